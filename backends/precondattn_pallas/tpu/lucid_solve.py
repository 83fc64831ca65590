"""LUCID's solve and its gradient on a TPU: from a user's arrays to launches.

Keys are passed to the kernels unnormalised, by heads, with their norms; right sides and solutions
are in float32. Memory holds these for T tokens of a key/value head, and nothing T × T.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from precondattn.arrays import Array
from precondattn.spec.lucid import LucidSolve
from precondattn_pallas.arrays import (
    by_heads,
    factor_of,
    reciprocal_rms,
    runs_of,
    where_valid,
)
from precondattn_pallas.launch import Interpret
from precondattn_pallas.lucid.solve import LucidSolveKernels
from precondattn_pallas.lucid.tiles import Phi
from precondattn_pallas.precision import LOG2_E
from precondattn_pallas.tpu.launch import in_lanes
from precondattn_pallas.tpu.lucid_gradient import d_keys
from precondattn_pallas.tpu.lucid_substitution import BLOCK, TpuSolveInputs, reach_of, solve
from precondattn_pallas.tpu.products import products
from precondattn_pallas.tpu.tiles import numbers_of


class TpuLucidPlan(NamedTuple):
    """Sizes and options of a call, which are known before it runs."""

    eps: float | None
    """ε in the norm of the keys; None where they are not normalised."""
    has_beta: bool
    scale: float
    phi: Phi
    interpret: Interpret

    def prepared(self, k: Array, beta: Array, valid: Array, segment: Array) -> TpuSolveInputs:
        b, s, n, d = k.shape
        tokens = -(-s // BLOCK) * BLOCK
        keys = where_valid(valid, k)
        reciprocal = reciprocal_rms(keys.astype(jnp.float32), self.eps)
        runs = jnp.zeros((b, s), jnp.int32) if segment is None else runs_of(segment)
        runs = jnp.broadcast_to(runs[:, :, None], (b, s, n))
        rows = factor_of(beta, valid, k), reciprocal, runs
        return TpuSolveInputs(
            by_heads(keys, tokens, in_lanes(d)),
            reciprocal,
            numbers_of([by_heads(row[..., None], tokens, 1)[..., 0] for row in rows], BLOCK),
            reach_of(segment, tokens),
        )

    def solve(self, x: TpuSolveInputs, right: Array, *, backward: bool) -> Array:
        """The solution of the system or its transpose; right (b, s, n, e)."""
        right = by_heads(right.astype(jnp.float32), x.keys.shape[1], in_lanes(right.shape[3]))
        options = {"has_beta": self.has_beta, "interpret": self.interpret}
        return solve(self.phi, x, right, backward=backward, **options)

    def key_gradient(self, x: TpuSolveInputs, y: Array, d_v: Array) -> Array:
        """Σ_b Φ_ab g_ab k̂_b (m, T, d), from y and dv (m, T, e)."""
        return d_keys(self.phi, x, y, d_v, interpret=self.interpret)


class TpuLucidSolve(LucidSolveKernels):
    """Algorithm of the leaf `LucidSolve`."""

    def plan(self, leaf: LucidSolve, x: Mapping[str, Array]) -> TpuLucidPlan:
        scale, d = leaf.scale_for(x["k"].shape[3]), x["k"].shape[3]
        phi = Phi(scale * LOG2_E, scale * d * LOG2_E, products(x["k"].dtype))
        eps = leaf.eps if leaf.normalize == "keys" else None
        return TpuLucidPlan(eps, leaf.beta, scale, phi, self.interpret)
