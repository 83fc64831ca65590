"""Gradients whose terms cancel: how large the terms are.

The gradient of a temperature is one number for all tokens,

    dτ = −Σ_t ⟨q_t, dq_t⟩ / τ,

and its terms cancel: on clustered keys the sum is up to 20 times smaller than the terms. A kernel
that recomputes its weights for the gradient has an error of dq that is well within its bound, but
large relative to dτ. So the error of dτ is measured against its terms. The same holds for λ of a
difference, dλ = −Σ_t ⟨do_t, o₂_t⟩, where −o₂ is the change of the output when λ grows by 1.

Where one key has all the weight, or is the only key, the gradients of queries and keys

    dq_i = s Σ_j P_ij (⟨do_i, v_j⟩ − ⟨do_i, o_i⟩) k_j

are nearly 0: the remainder of terms as large as s ‖do‖ ‖v‖ ‖k‖.
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
    """For each gradient that is such a sum: the size of its terms, the largest over all heads."""
    sizes: dict[str, float] = {}
    for call in mechanism.program.calls:
        if isinstance(call.leaf, pa.Tempered) and dict(call.arguments)["q"] == "q":
            terms = np.abs(np.sum(inputs["q"] * gradients["q"], axis=3))
            by_head = np.sum(terms, axis=(0, 1) if call.leaf.per == "head" else None)
            sizes["tau"] = float(np.max(by_head / inputs["tau"]))
        if isinstance(call.leaf, pa.Difference) and call.leaf is mechanism.program.leaves[-1]:
            at_larger_lam = {**inputs, "lam": inputs["lam"] + 1}
            changed = mechanism(**at_larger_lam, **masks, backend="reference")
            terms = np.abs(np.sum((changed - out) * cotangent, axis=3))
            sizes["lam"] = float(np.max(np.sum(terms, axis=(0, 1) if inputs["lam"].ndim else None)))
    return sizes


def sizes_when_saturated(inputs: dict[str, np.ndarray], cotangent: np.ndarray) -> dict[str, float]:
    """The size of the terms of every gradient that passes through a softmax of huge logits."""

    def longest(array: np.ndarray) -> float:
        return float(np.max(np.linalg.vector_norm(array, axis=-1)))

    rows = longest(cotangent) * longest(inputs["v"])
    scale = inputs["k"].shape[-1] ** -0.5
    q, k = longest(inputs["q"]), longest(inputs["k"])
    sizes = {"q": scale * k, "k": scale * q, "q2": scale * k, "k2": scale * q, "tau": scale * q * k}
    return {name: rows * sizes.get(name, 1.0) for name in inputs if name != "v"}
