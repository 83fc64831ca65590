"""How large the terms are of which a gradient is the sum.

The gradient of a temperature is one number for all tokens,

    dτ = −Σ_t ⟨q_t, dq_t⟩ / τ,

and its terms cancel: on clustered keys the sum is up to 20 times smaller than they are. An error of
dq that is well within its bound, as any kernel has that computes its weights a second time for the
gradient, is then large in relation to dτ. So the error of dτ is measured against its terms.
"""

from __future__ import annotations

import numpy as np

import precondattn as pa


def sizes_of_terms(
    mechanism: pa.Mechanism, inputs: dict[str, np.ndarray], gradients: dict[str, np.ndarray]
) -> dict[str, float]:
    """Of each gradient that is such a sum, the size of its terms: the largest of all heads'."""
    sizes: dict[str, float] = {}
    for call in mechanism.program.calls:
        if isinstance(call.leaf, pa.Tempered) and dict(call.arguments)["q"] == "q":
            terms = np.abs(np.sum(inputs["q"] * gradients["q"], axis=3))
            of_heads = np.sum(terms, axis=(0, 1) if call.leaf.per == "head" else None)
            sizes["tau"] = float(np.max(of_heads / inputs["tau"]))
    return sizes
