"""Leaves with a state: their own definition, on the recurrence in chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax import Array

from precondattn.cache import Replace, Updates
from precondattn.frame import Frame
from precondattn_jax.chunkwise import Chunkwise
from precondattn_portable.algorithm import Algorithm, Arrays, Residuals
from precondattn_portable.arithmetic import Arithmetic


class Stateful(Algorithm):
    """Of every `Stateful` leaf: its recurrences are `Chunkwise`."""

    def forward(
        self, ops: Arithmetic, leaf: Any, x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        return leaf.run(leaf.zero_state(x), x, frame, Chunkwise())[0], ()

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
        gradients: Arrays = leaf.run_vjp(zeros, x, frame, cotangent, zeros, Chunkwise())[0]
        return gradients

    def step(
        self,
        ops: Arithmetic,
        leaf: Any,
        past: Mapping[str, Array],
        x: Mapping[str, Array],
        frame: Frame,
    ) -> tuple[Array, Updates]:
        out, state = leaf.run(past, x, frame, Chunkwise())
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
        found: tuple[Arrays, Arrays] = leaf.run_vjp(
            past, x, frame, cotangent, d_buffers, Chunkwise()
        )
        return found
