"""Keys for mechanisms that are not well defined for all keys.

Different ones, where a maximum is part of the gradient. The pseudo-inverse of Nyström attention
divides by the largest sum of a column of A, whose derivative goes to that column. Columns of equal
keys are equal: rounding decides which of them is the largest, and two libraries disagree. Outputs
for equal keys are tested in `tests/mathematics/test_nystrom.py`.

And where a small ρ is all that two equal keys leave: LUCID without causality divides their
difference by ρ, and with it what rounding makes of Φ. Of ρ = 1e-3 and float32, 1e-3 of the result
is lost, in any way of computing it. Equal keys are tested with ρ = 0.1, and in float64 with any in
`tests/mathematics/test_symmetric_lucid.py`.

Shorter ones, where a preconditioner has no bound. With normalize "none", Φ_ii = exp(s ‖k_i‖²): it
overflows float32 from s ‖k‖² = 88 on, and long before that, two ways of computing the system's
solution have nothing in common.
"""

from __future__ import annotations

import numpy as np

import precondattn as pa
from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.arrays import Arrays
from precondattn_conformance.declared import is_bounded

LONGEST = 16.0
"""s ‖k‖² of a key of d entries of variance 1, once it is shortened."""

SMALL_RHO = 0.1
"""Below which LUCID's symmetric matrix of equal keys is too ill-conditioned for float32."""

NOISE = 0.1
"""That is added to keys, in half precision a different amount to each; of longer keys than random
ones, this part of their length."""

NOISE_OF_SMALL_RHO = 1.0
"""The same for a small ρ: keys of one cluster are then as different as others."""


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
