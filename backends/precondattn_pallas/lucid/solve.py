"""LUCID's solve and its gradient by Pallas kernels: the launches, from a user's arrays.

    y = (I + diag(β) stril(Φ))⁻¹ diag(β) v,    Φ_ij = e^{s ⟨k̂_i, k̂_j⟩ − s d}

by blocked forward substitution over super-blocks of S tokens. Tiles of Φ are recomputed wherever
they are used, forward and backward.

XLA computes the inputs of the kernels: normalised keys, β and right-hand sides, padded and by
heads. The kernels are in other files: the inverses of diagonal super-blocks (`inverse.py`),
substitution (`substitution.py`), and the gradient of the keys (`gradient.py`). For T tokens of a
key/value head, memory holds keys and y as operands, right sides in float32, and 2 S numbers per
token for inverses; nothing is T × T.

Half precision is computed in float16, whatever the inputs are: Φ ≤ 1, keys have norm √d, and
float16 has 3 more bits than bfloat16. Keys that are declared as already normalised may not be, and
are computed in float32 (tf32 on a GPU).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from precondattn.arrays import Array, Arrays, Residuals
from precondattn.frame import Frame
from precondattn.kernel_backend.limits import padded_width
from precondattn.kernel_backend.lucid import LucidSolveSupport
from precondattn.spec.lucid import LucidSolve
from precondattn_pallas.arrays import (
    by_heads,
    by_tokens,
    d_beta_of,
    factor_of,
    reciprocal_rms,
    rms_gradient,
    where_valid,
)
from precondattn_pallas.configurations import Configuration, configuration
from precondattn_pallas.launch import Interpret, whole
from precondattn_pallas.lucid import gradient as lucid_gradient
from precondattn_pallas.lucid import inverse as lucid_inverse
from precondattn_pallas.lucid import substitution as lucid_substitution
from precondattn_pallas.lucid.tiles import Phi, SolveInputs, segments_of
from precondattn_pallas.precision import LOG2_E, products

WIDEST_CHUNK = 128
"""Value channels that a program processes at once."""


class LucidPlan(NamedTuple):
    """Sizes and options of a call, which are known before it runs."""

    d: int
    e: int
    s: int
    eps: float | None
    """ε in the norm of the keys; None where they are not normalised."""
    has_beta: bool
    phi: Phi
    scale: float
    half: bool
    """Whether products use 16 bits."""
    inverse: Configuration
    update: Configuration
    gradient: Configuration

    @property
    def key_width(self) -> int:
        return padded_width(self.d)

    @property
    def chunk(self) -> int:
        return min(padded_width(self.e), WIDEST_CHUNK)

    @property
    def super_block(self) -> int:
        unit = max(self.inverse.rows, *self.update[:2], *self.gradient[:2])
        return max(unit, min(self.inverse.columns, 1 << (self.s - 1).bit_length()))

    @property
    def tokens(self) -> int:
        """s, padded to whole super-blocks."""
        return whole(self.s, self.super_block) * self.super_block

    def prepared(self, k: Array, beta: Array, valid: Array, segment: Array) -> SolveInputs:
        keys = where_valid(valid, k).astype(jnp.float32)
        reciprocal = reciprocal_rms(keys, self.eps)
        keys = (keys * reciprocal[..., None]).astype(jnp.float16 if self.half else jnp.float32)
        return SolveInputs(
            by_heads(keys, self.tokens, self.key_width),
            reciprocal,
            by_heads(factor_of(beta, valid, k)[..., None], self.tokens, 1)[..., 0],
            segments_of(segment, self.tokens),
        )

    def solve(self, x: SolveInputs, right: Array, *, backward: bool) -> lucid_substitution.Solved:
        """The solution of the system or its transpose; right (b, s, n, e)."""
        inverse = lucid_inverse.inverses(
            self.phi, x, self.inverse, super_block=self.super_block, backward=backward
        )
        right = right.astype(jnp.float32)
        return lucid_substitution.substitute(
            self.phi,
            x,
            inverse,
            by_heads(right, self.tokens, whole(self.e, self.chunk) * self.chunk),
            (self.inverse, self.update),
            count=self.s,
            chunk=self.chunk,
            backward=backward,
        )

    def key_gradient(self, x: SolveInputs, y: Array, d_v: Array) -> Array:
        """Σ_b Φ_ab g_ab k̂_b (m, T, d), from y and dv (m, T, e)."""
        return lucid_gradient.d_keys(
            self.phi, x, y, d_v, self.gradient, count=self.s, chunk=self.chunk
        )


@partial(jax.jit, static_argnums=0)
def _forward(
    plan: LucidPlan, k: Array, v: Array, beta: Array, valid: Array, segment: Array
) -> Array:
    prepared = plan.prepared(k, beta, valid, segment)
    solved = plan.solve(prepared, where_valid(valid, v), backward=False)
    y = by_tokens(solved.values, v)
    return y, (by_tokens(solved.before_beta, v),) if plan.has_beta else ()


@partial(jax.jit, static_argnums=0)
def _backward(
    plan: LucidPlan,
    k: Array,
    beta: Array,
    valid: Array,
    segment: Array,
    y: Array,
    rho: Array,
    d_y: Array,
) -> Array:
    prepared = plan.prepared(k, beta, valid, segment)
    solved = plan.solve(prepared, where_valid(valid, d_y), backward=True)
    rows = by_heads(where_valid(valid, y), *solved.values.shape[1:])
    d_keys = plan.key_gradient(prepared, rows, solved.values.astype(y.dtype))
    result = {"v": by_tokens(solved.values, y)}
    d_unit = -plan.scale * by_tokens(d_keys, k.astype(jnp.float32))
    result["k"] = rms_gradient(d_unit, k, prepared.reciprocal, valid, plan.eps)
    if plan.has_beta:
        result["lucid_beta"] = d_beta_of(solved.before_beta, rho, beta, valid)
    return result


class LucidSolveKernels(LucidSolveSupport):
    """Algorithm of the leaf `LucidSolve`."""

    def __init__(self, *, interpret: Interpret) -> None:
        self.interpret = interpret

    def plan(self, leaf: LucidSolve, x: Mapping[str, Array]) -> tuple[object, ...]:
        """The sizes and options of a call."""
        k, (s, d), e = x["k"], x["k"].shape[1::2], x["v"].shape[3]
        half = k.dtype.itemsize == 2 and leaf.normalize == "keys"
        widest = max(padded_width(d), min(padded_width(e), WIDEST_CHUNK))
        scale = leaf.scale_for(d)
        multiplied = products(k.dtype, interpret=self.interpret)
        if half:
            multiplied = multiplied._replace(tf32=True)  # Φ has 16 bits.
        phi = Phi(scale * LOG2_E, scale * d * LOG2_E, multiplied)
        tiles = (
            configuration(f"lucid_{name}", widest, half)
            for name in ("inverse", "update", "gradient")
        )
        eps = leaf.eps if leaf.normalize == "keys" else None
        return LucidPlan(d, e, s, eps, leaf.beta, phi, scale, half, *tiles)

    def forward(
        self, leaf: LucidSolve, x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        beta, masks = x.get("lucid_beta"), (frame.k_valid, frame.k_segment)
        result: tuple[Array, Residuals] = _forward(self.plan(leaf, x), x["k"], x["v"], beta, *masks)
        return result

    def backward(
        self,
        leaf: LucidSolve,
        x: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        beta, masks = x.get("lucid_beta"), (frame.k_valid, frame.k_segment)
        (rho,) = residuals or (None,)
        result: Arrays = _backward(self.plan(leaf, x), x["k"], beta, *masks, out, rho, cotangent)
        return result
