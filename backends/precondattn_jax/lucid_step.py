"""A step of LUCID's solve: subtract the cached tokens' part, then solve among the new tokens.

y_new = (I + β stril(Φ_new))⁻¹ β (v − Φ_past y_past)
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

import precondattn as pa
from precondattn.frame import Frame
from precondattn.spec.rms_norm import rms
from precondattn_jax.arithmetic import product, product_with_transposed
from precondattn_jax.layout import heads_first
from precondattn_jax.lucid_system import LucidSystem
from precondattn_jax.past import BufferedPast, with_derivative_of_the_definition
from precondattn_portable.extension import new_tokens


@with_derivative_of_the_definition
def lucid_step(
    leaf: pa.LucidSolve, past: dict[str, Array], x: dict[str, Array], frame: Frame
) -> Array:
    """y (b, t, n, e) of new tokens, with the dot product and a unit diagonal."""
    b, t, n, d = x["k"].shape
    scale = leaf.scale_for(d)
    k = x["k"] / rms(x["k"], leaf.eps) if leaf.normalize == "keys" else x["k"]
    rows = heads_first(k * scale)
    among = frame.among_keys(t)
    cached = BufferedPast(among, past["key"].shape[1], b * n)
    if leaf.window is not None:
        cached.look_no_further_than(leaf.window)

    def take(j: Array, right: Array) -> Array:
        tile = product_with_transposed(rows, cached.take(past["key"], j))
        if leaf.normalize == "keys":
            r = cached.take(past["rms"], j)[:, :, None, :]
            tile = tile / jnp.where(r > 0, r, 1.0)  # Empty slots, which are masked, hold 0.
        visible = cached.visible(j, among.q_position, leaf.window)[:, :, 0]
        weights = jnp.where(visible, jnp.exp(tile - scale * d), 0.0)
        return right - product(weights, cached.take(past["solved"], j))

    right = heads_first(cached.over(take, heads_first(x["v"])))
    return LucidSystem(leaf, {**x, "v": right}, new_tokens(frame, t)).solved()
