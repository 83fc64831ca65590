"""How large the terms are of which a gradient is the sum.

The gradient of a temperature is one number for all tokens,

    dτ = −Σ_t ⟨q_t, dq_t⟩ / τ,

and its terms cancel: on clustered keys the sum is up to 20 times smaller than they are. An error of
dq that is well within its bound, as any kernel has that computes its weights a second time for the
gradient, is then large in relation to dτ. So the error of dτ is measured against its terms. So is
that of a difference's λ, dλ = −Σ_t ⟨do_t, o₂_t⟩, of which −o₂ is what the output changes by if λ
grows by 1.

Where one key has all the weight, or there is only one, the gradients of queries and keys are as
good as 0,

    dq_i = s Σ_j P_ij (⟨do_i, v_j⟩ − ⟨do_i, o_i⟩) k_j,

and are what is left of terms as large as s ‖do‖ ‖v‖ ‖k‖.
"""

from __future__ import annotations

import numpy as np

import precondattn as pa


def sizes_of_terms(
    mechanism: pa.Mechanism,
    inputs: dict[str, np.ndarray],
    gradients: dict[str, np.ndarray],
    out: np.ndarray,
    cotangent: np.ndarray,
    masks: dict[str, np.ndarray],
) -> dict[str, float]:
    """Of each gradient that is such a sum, the size of its terms: the largest of all heads'."""
    sizes: dict[str, float] = {}
    for call in mechanism.program.calls:
        if isinstance(call.leaf, pa.Tempered) and dict(call.arguments)["q"] == "q":
            terms = np.abs(np.sum(inputs["q"] * gradients["q"], axis=3))
            of_heads = np.sum(terms, axis=(0, 1) if call.leaf.per == "head" else None)
            sizes["tau"] = float(np.max(of_heads / inputs["tau"]))
        if isinstance(call.leaf, pa.Difference) and call.leaf is mechanism.program.leaves[-1]:
            more = mechanism(**{**inputs, "lam": inputs["lam"] + 1}, **masks, backend="reference")
            terms = np.abs(np.sum((more - out) * cotangent, axis=3))
            sizes["lam"] = float(np.max(np.sum(terms, axis=(0, 1) if inputs["lam"].ndim else None)))
    return sizes


def sizes_when_saturated(inputs: dict[str, np.ndarray], cotangent: np.ndarray) -> dict[str, float]:
    """The size of the terms of every gradient that goes through a softmax of huge logits."""

    def longest(array: np.ndarray) -> float:
        return float(np.max(np.linalg.vector_norm(array, axis=-1)))

    rows = longest(cotangent) * longest(inputs["v"])
    scale = inputs["k"].shape[-1] ** -0.5
    q, k = longest(inputs["q"]), longest(inputs["k"])
    of = {"q": scale * k, "k": scale * q, "q2": scale * k, "k2": scale * q, "tau": scale * q * k}
    return {name: rows * of.get(name, 1.0) for name in inputs if name != "v"}
