"""LUCID's solve as an algorithm of the backend: full calls, and steps."""

from __future__ import annotations

from jax import Array

import precondattn as pa
from precondattn.arrays import Arrays, Residuals
from precondattn.cache import Append, Updates
from precondattn.frame import Frame
from precondattn.spec.metric import DOT
from precondattn.spec.rms_norm import rms
from precondattn_jax.definition import step_as_defined
from precondattn_jax.lucid_gradient import gradients
from precondattn_jax.lucid_step import lucid_step
from precondattn_jax.lucid_system import LucidSystem
from precondattn_portable.algorithm import Algorithm


class LucidSolveBlocks(Algorithm[pa.LucidSolve]):
    """Algorithm of the leaf `LucidSolve`."""

    name = "substitution in blocks"

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        return LucidSystem(self.leaf, x, frame).solved(), ()

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        return gradients(LucidSystem(self.leaf, x, frame), out, cotangent)

    def step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        leaf = self.leaf
        if leaf.metric != DOT or not leaf.has_unit_diagonal:
            return step_as_defined(leaf, past, x, frame)
        y = lucid_step(leaf, dict(past), dict(x), frame)
        updates: Updates = {"key": Append(x["k"]), "solved": Append(y)}
        if leaf.normalize == "keys":
            updates["rms"] = Append(rms(x["k"], leaf.eps)[..., 0])
        return y, updates
