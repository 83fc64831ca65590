"""Leaves without sums over tokens: their definition is already linear in memory."""

from __future__ import annotations

from collections.abc import Mapping

from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.arrays import Array, Arrays, Residuals
from precondattn.cache import Updates
from precondattn.frame import Frame
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.arithmetic import Arithmetic


class AsDefined(Algorithm[LeafProtocol]):
    """Calls the leaf's own methods."""

    def forward(
        self, ops: Arithmetic, leaf: LeafProtocol, x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        result: tuple[Array, Residuals] = leaf.forward(x, frame)
        return result

    def backward(
        self,
        ops: Arithmetic,
        leaf: LeafProtocol,
        x: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        gradients: Arrays = leaf.backward(x, frame, out, residuals, cotangent)
        return gradients

    def step(
        self,
        ops: Arithmetic,
        leaf: LeafProtocol,
        past: Mapping[str, Array],
        x: Mapping[str, Array],
        frame: Frame,
    ) -> tuple[Array, Updates]:
        result: tuple[Array, Updates] = leaf.step(past, x, frame)
        return result

    def step_backward(
        self,
        ops: Arithmetic,
        leaf: LeafProtocol,
        past: Mapping[str, Array],
        x: Mapping[str, Array],
        frame: Frame,
        cotangent: Array,
        d_buffers: Mapping[str, Array],
    ) -> tuple[Arrays, Arrays]:
        result: tuple[Arrays, Arrays] = leaf.step_backward(past, x, frame, cotangent, d_buffers)
        return result
