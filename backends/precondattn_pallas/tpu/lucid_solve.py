"""LUCID's solve and its gradient on a TPU: from a user's arrays to launches.

Keys are passed to the kernels unnormalised, by heads, with their norms; right sides and solutions
are in float32. Memory holds these for T tokens of a key/value head, and nothing T × T.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from precondattn.arrays import Array
from precondattn.spec.lucid import LucidSolve
from precondattn_pallas.launch import Interpret
from precondattn_pallas.lucid.arrays import (
    by_heads,
    by_tokens,
    d_beta_of,
    factor_of,
    reciprocal_rms,
    rms_gradient,
)
from precondattn_pallas.lucid.solve import LucidSolveKernels
from precondattn_pallas.lucid.tiles import Phi
from precondattn_pallas.masks import runs_of, where_valid
from precondattn_pallas.precision import LOG2_E
from precondattn_pallas.tpu.launch import in_lanes
from precondattn_pallas.tpu.lucid_gradient import d_keys
from precondattn_pallas.tpu.lucid_substitution import solve
from precondattn_pallas.tpu.lucid_tiles import BLOCK, reach_of
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


class TpuSolveInputs(NamedTuple):
    """The inputs of a forward or backward solve."""

    keys: Array
    """(m, T, d), in whole blocks"""
    reciprocal: Array
    """1 / rms (b, s, n)"""
    numbers: Array
    """(m, blocks, 8, BLOCK)"""
    reach: Array
    """(2 b blocks,): the blocks of the same segments (`lucid_tiles.py`); None without segments"""


def _prepared(
    plan: TpuLucidPlan, k: Array, beta: Array, valid: Array, segment: Array
) -> TpuSolveInputs:
    b, s, n, d = k.shape
    tokens = -(-s // BLOCK) * BLOCK
    keys = where_valid(valid, k)
    reciprocal = reciprocal_rms(keys.astype(jnp.float32), plan.eps)
    runs = jnp.zeros((b, s), jnp.int32) if segment is None else runs_of(segment)
    rows = (
        factor_of(beta, valid, k),
        reciprocal,
        jnp.broadcast_to(runs[:, :, None], (b, s, n)),
    )
    return TpuSolveInputs(
        by_heads(keys, tokens, in_lanes(d)),
        reciprocal,
        numbers_of([by_heads(row[..., None], tokens, 1)[..., 0] for row in rows], BLOCK),
        reach_of(segment, tokens),
    )


def _solve(plan: TpuLucidPlan, x: TpuSolveInputs, right: Array, *, backward: bool) -> Array:
    """The solution of the system or its transpose; right (b, s, n, e)."""
    heads = right.shape[2]
    right = by_heads(right.astype(jnp.float32), x.keys.shape[1], in_lanes(right.shape[3]))
    return solve(
        plan.phi,
        x.keys,
        x.numbers,
        x.reach,
        right,
        heads=heads,
        has_beta=plan.has_beta,
        backward=backward,
        interpret=plan.interpret,
    )


@partial(jax.jit, static_argnums=0)
def _forward(
    plan: TpuLucidPlan, k: Array, v: Array, beta: Array, valid: Array, segment: Array
) -> Array:
    prepared = _prepared(plan, k, beta, valid, segment)
    solved = _solve(plan, prepared, where_valid(valid, v), backward=False)
    y = by_tokens(solved.values, v)
    return y, (by_tokens(solved.before_beta, v),) if plan.has_beta else ()


@partial(jax.jit, static_argnums=0)
def _backward(
    plan: TpuLucidPlan,
    k: Array,
    beta: Array,
    valid: Array,
    segment: Array,
    y: Array,
    rho: Array,
    d_y: Array,
) -> Array:
    prepared = _prepared(plan, k, beta, valid, segment)
    solved = _solve(plan, prepared, where_valid(valid, d_y), backward=True)
    d_unit = d_keys(
        plan.phi,
        prepared.keys,
        prepared.numbers,
        prepared.reach,
        by_heads(where_valid(valid, y), *solved.values.shape[1:]),
        solved.values.astype(y.dtype),
        heads=k.shape[2],
        interpret=plan.interpret,
    )
    d_unit = -plan.scale * by_tokens(d_unit, k.astype(jnp.float32))
    result = {
        "k": rms_gradient(d_unit, k, prepared.reciprocal, valid, plan.eps),
        "v": by_tokens(solved.values, y),
    }
    if plan.has_beta:
        result["lucid_beta"] = d_beta_of(solved.before_beta, rho, beta, valid)
    return result


class TpuLucidSolve(LucidSolveKernels):
    """Algorithm of the leaf `LucidSolve`."""

    solved, pulled = staticmethod(_forward), staticmethod(_backward)

    def plan(self, leaf: LucidSolve, x: Mapping[str, Array]) -> TpuLucidPlan:
        scale, d = leaf.scale_for(x["k"].shape[3]), x["k"].shape[3]
        phi = Phi(scale * LOG2_E, scale * d * LOG2_E, products(x["k"].dtype))
        eps = leaf.eps if leaf.normalize == "keys" else None
        return TpuLucidPlan(eps, leaf.beta, scale, phi, self.interpret)
