"""Keys for mechanisms that are not well defined for all keys.

Different ones, where a maximum is part of the gradient. The pseudo-inverse of Nyström attention
divides by the largest sum of a column of A, whose derivative goes to that column. Columns of equal
keys are equal: rounding decides which of them is the largest, and two libraries disagree. Outputs
for equal keys are tested in `tests/mathematics/test_nystrom.py`.

Shorter ones, where a preconditioner has no bound. With normalize "none", Φ_ii = exp(s ‖k_i‖²): it
overflows float32 from s ‖k‖² = 88 on, and long before that, two ways of computing the system's
solution have nothing in common.
"""

from __future__ import annotations

import numpy as np

import precondattn as pa
from precondattn_conformance.declared import is_bounded
from precondattn_conformance.inputs import Arrays

LONGEST = 16.0
"""s ‖k‖² of a key of d entries of variance 1, once it is shortened."""

NOISE = 0.1
"""That is added to keys, in half precision a different amount to each."""


def with_harmless_keys(mechanism: pa.Mechanism, inputs: Arrays) -> Arrays:
    """The inputs, with noise on keys where a maximum is part of the gradient, and with keys of at
    most half their length where the mechanism has no bound."""
    if any(isinstance(leaf, pa.Nystrom) for leaf in mechanism.program.leaves):
        k = inputs["k"]
        return inputs | {"k": k + NOISE * np.random.default_rng(3).normal(size=k.shape)}
    if is_bounded(mechanism) or "k" not in inputs:
        return inputs
    k = inputs["k"]
    d = k.shape[-1]
    leaves = (leaf for leaf in mechanism.program.leaves if isinstance(leaf, pa.LucidSolve))
    scale = max(leaf.scale_for(d) for leaf in leaves)
    return inputs | {"k": min(0.5, (LONGEST / (scale * d)) ** 0.5) * k}
