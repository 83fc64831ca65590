"""Keys for mechanisms whose preconditioner has no bound: shorter ones.

With normalize "none", Φ_ii = exp(s ‖k_i‖²): it overflows float32 from s ‖k‖² = 88 on, and long
before that, two ways of computing the system's solution have nothing in common.
"""

from __future__ import annotations

import precondattn as pa
from precondattn_conformance.declared import is_bounded
from precondattn_conformance.inputs import Arrays

LONGEST = 16.0
"""s ‖k‖² of a key of d entries of variance 1, once it is shortened."""


def with_harmless_keys(mechanism: pa.Mechanism, inputs: Arrays) -> Arrays:
    """The inputs, with keys of at most half their length where the mechanism has no bound."""
    if is_bounded(mechanism) or "k" not in inputs:
        return inputs
    k = inputs["k"]
    d = k.shape[-1]
    leaves = (leaf for leaf in mechanism.program.leaves if isinstance(leaf, pa.LucidSolve))
    scale = max(leaf.scale_for(d) for leaf in leaves)
    return inputs | {"k": min(0.5, (LONGEST / (scale * d)) ** 0.5) * k}
