"""Keys for mechanisms that are not well defined for all keys.

Equal keys are made different where a maximum is part of the gradient. The pseudo-inverse of Nyström
attention divides by the largest sum of a column of A, whose derivative goes to that column. Columns
of equal keys are equal: rounding decides which of them is the largest, and two libraries disagree.
Outputs for equal keys are tested in `tests/mathematics/test_nystrom.py`.

They are also made different where the matrix of two equal keys is invertible only because of a
small ρ: LUCID without causality divides their difference by ρ, and with it the rounding error of Φ.
With ρ = 1e-3 in float32, a relative error of 1e-3 is unavoidable, however it is computed. Equal
keys are tested with ρ = 0.1, and in float64 with any ρ in
`tests/mathematics/test_symmetric_lucid.py`.

Keys are made shorter where a preconditioner has no bound. With normalize "none", Φ_ii = exp(s
‖k_i‖²): it overflows float32 from s ‖k‖² = 88 on. Long before that, two ways of solving the system
give entirely different results.
"""

from __future__ import annotations

import numpy as np

import precondattn as pa
from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.arrays import Arrays
from precondattn_conformance.declared import is_bounded

LONGEST = 16.0
"""The largest s ‖k‖² of a shortened key, whose d entries had variance 1."""

SMALL_RHO = 0.1
"""The smallest ρ with which LUCID's matrix of equal keys is solvable in float32."""

NOISE = 0.1
"""The size of the noise added to keys; keys longer than random ones get proportionally more."""

NOISE_OF_SMALL_RHO = 1.0
"""The size of the noise for a small ρ, with which keys of one cluster differ as much as others."""


def with_harmless_keys(mechanism: pa.Mechanism, inputs: Arrays) -> Arrays:
    """The inputs, with noise on keys where a maximum is part of the gradient or ρ is small, and
    with keys of at most half their length where the mechanism has no bound."""
    inputs = with_different_keys(mechanism, inputs)
    if is_bounded(mechanism) or "k" not in inputs:
        return inputs
    k = inputs["k"]
    d = k.shape[-1]
    leaves = (leaf for leaf in mechanism.program.leaves if isinstance(leaf, pa.LucidSolve))
    scale = max(leaf.scale_for(d) for leaf in leaves)
    return inputs | {"k": min(0.5, (LONGEST / (scale * d)) ** 0.5) * k}


def with_different_keys(mechanism: pa.Mechanism, inputs: Arrays) -> Arrays:
    """The inputs, with noise on keys where a maximum is part of the gradient or ρ is small."""
    noise = max(map(_needed_noise, mechanism.program.leaves))
    if not noise:
        return inputs
    k = inputs["k"]
    size = float(np.sqrt(np.mean(k**2)))
    noisy = k + max(1.0, size) * noise * np.random.default_rng(3).normal(size=k.shape)
    if size > 1.0:  # Extreme keys may be as long as their dtype allows.
        noisy *= np.max(np.abs(k)) / max(np.max(np.abs(k)), np.max(np.abs(noisy)))
    return inputs | {"k": noisy}


def _needed_noise(leaf: LeafProtocol) -> float:
    if isinstance(leaf, pa.SymmetricLucidSolve) and leaf.rho < SMALL_RHO:
        return NOISE_OF_SMALL_RHO
    return NOISE if isinstance(leaf, pa.Nystrom) else 0.0
