"""Leaves with a state: their own definition, with the recurrence in chunks, or of one token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from precondattn.arrays import Array, Arrays, Residuals
from precondattn.cache import Replace, Updates
from precondattn.frame import Frame
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.chunkwise import Chunkwise
from precondattn_portable.one_token import OneToken


class StatefulAlgorithm(Algorithm):
    """Algorithm of every `Stateful` leaf; `in_chunks` builds its recurrences for an arithmetic."""

    def __init__(self, in_chunks: Callable[[Arithmetic], Any] = Chunkwise) -> None:
        self.in_chunks = in_chunks

    def _form(self, ops: Arithmetic, leaf: Any, x: Mapping[str, Array]) -> Any:
        if x["k"].shape[1] == 1:
            return OneToken(ops, decays=leaf.has_decay)
        return self.in_chunks(ops)

    def forward(
        self, ops: Arithmetic, leaf: Any, x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        form = self._form(ops, leaf, x)
        return leaf.run(leaf.zero_state(x), x, frame, form)[0], ()

    def backward(
        self,
        ops: Arithmetic,
        leaf: Any,
        x: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        zeros, form = leaf.zero_state(x), self._form(ops, leaf, x)
        gradients: Arrays = leaf.run_vjp(zeros, x, frame, cotangent, zeros, form)[0]
        return gradients

    def step(
        self,
        ops: Arithmetic,
        leaf: Any,
        past: Mapping[str, Array],
        x: Mapping[str, Array],
        frame: Frame,
    ) -> tuple[Array, Updates]:
        out, state = leaf.run(past, x, frame, self._form(ops, leaf, x))
        return out, {name: Replace(value) for name, value in state.items()}

    def step_backward(
        self,
        ops: Arithmetic,
        leaf: Any,
        past: Mapping[str, Array],
        x: Mapping[str, Array],
        frame: Frame,
        cotangent: Array,
        d_buffers: Mapping[str, Array],
    ) -> tuple[Arrays, Arrays]:
        form = self._form(ops, leaf, x)
        result: tuple[Arrays, Arrays] = leaf.run_vjp(past, x, frame, cotangent, d_buffers, form)
        return result
