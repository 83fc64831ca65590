"""LUCID's solve as an algorithm of the backend: full calls, and steps.

A step subtracts the cached tokens' part, then solves among the new tokens:

    y_new = (I + β stril(Φ_new))⁻¹ β (v − Φ_past y_past)
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

import precondattn as pa
from precondattn.arrays import Arrays, Residuals
from precondattn.cache import Append, Updates
from precondattn.frame import Frame
from precondattn.spec.metric import DOT
from precondattn.spec.rms_norm import rms
from precondattn_jax.arithmetic import product, product_with_transposed
from precondattn_jax.definition import SteppingAsDefined
from precondattn_jax.layout import heads_first
from precondattn_jax.lucid_gradient import gradients
from precondattn_jax.lucid_system import LucidSystem
from precondattn_jax.past import BufferedPast
from precondattn_portable.extension import new_tokens


class LucidSolveBlocks(SteppingAsDefined[pa.LucidSolve]):
    """Algorithm of the leaf `LucidSolve`."""

    name = "substitution in blocks"

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        return LucidSystem(self.leaf, x, frame).solved(), ()

    def output(self, x: Arrays, frame: Frame) -> Array:
        return LucidSystem(self.leaf, x, frame).differentiable()

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        return gradients(LucidSystem(self.leaf, x, frame), out, cotangent)

    def step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        if self.leaf.metric != DOT or not self.leaf.has_unit_diagonal:
            return super().step(past, x, frame)
        return self.with_derivative_of_the_definition(self._step)(past, x, frame)

    def _step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        """With the dot product and a unit diagonal."""
        leaf, (b, t, n, d) = self.leaf, x["k"].shape
        scale, updates = leaf.scale_for(d), dict[str, Append](key=Append(x["k"]))
        k = x["k"]
        if leaf.normalize == "keys":
            r = rms(k, leaf.eps)
            k, updates["rms"] = k / r, Append(r[..., 0])
        rows, among = heads_first(k * scale), frame.among_keys(t)
        cached = BufferedPast(among, past["key"].shape[1], b * n, leaf.window)

        def take(j: Array, right: Array) -> Array:
            tile = product_with_transposed(rows, cached.take(past["key"], j))
            if leaf.normalize == "keys":
                r = cached.take(past["rms"], j)[:, :, None, :]
                tile = tile / jnp.where(r > 0, r, 1.0)  # Empty slots, which are masked, hold 0.
            visible = cached.visible(j, among.q_position)[:, :, 0]
            weights = jnp.where(visible, jnp.exp(tile - scale * d), 0.0)
            return right - product(weights, cached.take(past["solved"], j))

        right = heads_first(cached.over(take, heads_first(x["v"])))
        y = LucidSystem(leaf, {**x, "v": right}, new_tokens(frame, t)).solved()
        return y, {**updates, "solved": Append(y)}
