"""LUCID's solve as an algorithm of the backend: full calls, and steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax import Array

from precondattn.frame import Frame
from precondattn_jax.lucid_gradient import gradients
from precondattn_jax.lucid_system import LucidSystem
from precondattn_portable.algorithm import Algorithm, Arrays, Residuals
from precondattn_portable.arithmetic import Arithmetic


class LucidSolve(Algorithm):
    """Of `LucidSolve`."""

    def forward(
        self, ops: Arithmetic, leaf: Any, x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        return LucidSystem(leaf, x, frame).solved(), ()

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
        return gradients(LucidSystem(leaf, x, frame), out, cotangent)
