"""Leaves with a state: their own definition, with the recurrence computed in chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from precondattn.arrays import Array, Arrays, Residuals
from precondattn.cache import Replace, Updates
from precondattn.frame import Frame
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.chunkwise import Chunkwise


class StatefulAlgorithm(Algorithm):
    """Algorithm of every `Stateful` leaf; `form` builds its recurrences for an arithmetic."""

    def __init__(self, form: Callable[[Arithmetic], Any] = Chunkwise) -> None:
        self.form = form

    def forward(
        self, ops: Arithmetic, leaf: Any, x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        return leaf.run(leaf.zero_state(x), x, frame, self.form(ops))[0], ()

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
        zeros = leaf.zero_state(x)
        gradients: Arrays = leaf.run_vjp(zeros, x, frame, cotangent, zeros, self.form(ops))[0]
        return gradients

    def step(
        self,
        ops: Arithmetic,
        leaf: Any,
        past: Mapping[str, Array],
        x: Mapping[str, Array],
        frame: Frame,
    ) -> tuple[Array, Updates]:
        out, state = leaf.run(past, x, frame, self.form(ops))
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
        result: tuple[Arrays, Arrays] = leaf.run_vjp(
            past, x, frame, cotangent, d_buffers, self.form(ops)
        )
        return result
