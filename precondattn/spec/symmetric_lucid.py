"""LUCID's preconditioner without causality: values decorrelated by all keys, by a symmetric solve.

    (Φ + ρ I) y = v,    Φ_ij = exp(s ⟨RN(k_i), RN(k_j)⟩ − s d),    Φ_ii = 1

Attention then reads y in place of v, as in `lucid.py`. There the matrix is the lower triangle of Φ;
here it is all of Φ, which is symmetric and positive semidefinite: exp of a Gram matrix is, by
Schur's product theorem, and raising its diagonal to 1 keeps it so. But two equal keys have two
equal rows. So ρ > 0 is added, with which the matrix P = (Φ + ρ I)⁻¹ exists for any keys, and

    ‖P‖ ≤ 1 / ρ,    |P_ij| ≤ 1 / ρ,    cond(Φ + ρ I) ≤ (N + ρ) / ρ.

LUCID's authors define the causal form only (3.2). Masks make Φ_ij = 0 between packed sequences, and
a masked token has y = 0; both leave Φ positive semidefinite. A window would not.

Gradient, with (Φ + ρ I) x = dy:

    dv = x,    dΦ = −x yᵀ off the diagonal,

then through exp, the scores, and the norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Flops, Inputs, Leaf, Offers, options
from precondattn.algebra.flops import pair_flops, visible_pairs
from precondattn.arrays import Array, Arrays, ByName, Residuals, namespace
from precondattn.frame import Frame
from precondattn.spec.array_functions import (
    identity_like,
    mask_scores,
    swap_time_and_heads,
    transpose,
    where_valid,
)
from precondattn.spec.positive_definite import solve_positive
from precondattn.spec.rms_norm import rms, rms_norm_vjp

ITERATIONS = 10
"""Products with Φ that are counted as the cost of a solve."""


@dataclass(frozen=True)
class SymmetricLucidSolve(Leaf):
    """y with (Φ + ρ I) y = v, Φ = exp(s ⟨RN(k), RN(k)⟩ − s d), over all tokens of a sequence.

    It is not causal and has no cache. The definition factorizes the matrix; blocked backends solve
    longer sequences by iteration, without storing it, and check the residual r of each column e:

        ‖r‖ ≤ τ ‖v‖ + 4 ε ‖Φ + ρ I‖_∞ ‖y‖,    ε the distance from 1 to the next number.

    The second term is the rounding of the product with the matrix, below which no residual is
    known. Where it is not reached they raise a `NotSolvedError`, or, under JAX, the column is NaN.

    Source: This library. The causal form is that of LUCID, Eq. 2.

    Parameters
    ----------
    rho : float
        ρ, above 0.
    scale : float, optional
        The scale s; d^{-1/2} by default.
    normalize : {"keys", "given"}
        "keys": keys are normalised here. "given": they are normalised before.
    eps : float
        In the norm: rms(k) = √(mean(k²) + eps).
    tolerance : float, optional
        τ; by default 1e-6, and 1e-13 in float64.
    iterations : int
        The largest number of iterations.

    Examples
    --------
    Two equal keys share what they hold, and ρ bounds their difference:

    >>> import numpy as np
    >>> k, v = np.ones((1, 2, 1, 8)), np.asarray([3.0, 1.0]).reshape(1, 2, 1, 1)
    >>> y = SymmetricLucidSolve(rho=0.1)(k, v).ravel()
    >>> print(y.sum().round(2), (y[0] - y[1]).round(2))
    1.9 20.0
    """

    name: ClassVar[str] = "symmetric_lucid_solve"
    role: ClassVar[str] = "piece"
    variants: ClassVar[tuple[str, ...]] = ("symmetric_lucid_solve[rho=0.1,scale=0.3,eps=0]",)

    rho: float = options.positive(1e-3)
    scale: float | None = options.positive_or_none()
    normalize: str = options.choice("keys", "given")
    eps: float = options.non_negative(1e-6)
    tolerance: float | None = options.positive_or_none()
    iterations: int = options.count(200)

    inputs = Inputs(k="b s n d", v="b s n e")
    output = "b s n e"

    @property
    def offers(self) -> Offers:
        return Offers(scale=self.scale, causal=False)

    def flops(self, sizes: Mapping[str, int]) -> Flops:
        """The FLOPs of attention of the keys to themselves, once for each product with Φ."""
        s, d, e = sizes["s"], sizes["d"], sizes["e"]
        each = pair_flops(visible_pairs(s, s, causal=False), s, d, e)
        solve = ITERATIONS * each.forward
        return Flops(solve, solve + each.backward - each.forward, 0.0).times(sizes["n"])

    def unit_keys(self, k: Array) -> Array:
        """RN(k) of keys (…, d)."""
        return k / rms(k, self.eps) if self.normalize == "keys" else k

    def similarities(self, unit: Array, frame: Frame) -> Array:
        """Φ off the diagonal, which is 0 (b, n, s, s), of normalised keys (b, n, s, d)."""
        scale, d = self.scale_for(unit.shape[3]), unit.shape[3]
        scores = scale * (unit @ transpose(unit)) - scale * d
        visible = frame.among_keys(unit.shape[2]).visible(causal=False)
        return namespace(unit).exp(mask_scores(visible & (identity_like(scores) == 0), scores))

    def solved(self, similarities: Array, right: Array) -> Array:
        """(Φ + ρ I)⁻¹ right (b, n, s, e)."""
        one = identity_like(similarities)
        return solve_positive(similarities + (1.0 + self.rho) * one, right)

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        phi = self.similarities(self.unit_keys(swap_time_and_heads(x["k"])), frame)
        v = where_valid(swap_time_and_heads(x["v"]), frame)
        return swap_time_and_heads(self.solved(phi, v)), ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        k, y = swap_time_and_heads(x["k"]), swap_time_and_heads(out)
        unit = self.unit_keys(k)
        phi = self.similarities(unit, frame)
        d_v = self.solved(phi, where_valid(swap_time_and_heads(cotangent), frame))
        d_scores = -self.scale_for(k.shape[3]) * (d_v @ transpose(y)) * phi
        d_k = (d_scores + transpose(d_scores)) @ unit
        if self.normalize == "keys":
            d_k = rms_norm_vjp(k, self.eps, d_k)
        return {"k": swap_time_and_heads(d_k), "v": swap_time_and_heads(d_v)}
