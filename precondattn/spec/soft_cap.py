"""Soft-capping: logits bounded by a cap c.

    S ← c tanh(S / c)

It is applied to the scaled scores, before a decay or a bias is added and before the mask. Source:
Gemma 2 (arXiv 2408.00118) 2. Gradient: dS ∘ (1 − tanh²(S / c)).
"""

from __future__ import annotations

from precondattn.arrays import Array, namespace


def capped(scores: Array, cap: float) -> Array:
    """c tanh(S / c)."""
    return cap * namespace(scores).tanh(scores / cap)


def slope(scores: Array, cap: float) -> Array:
    """The derivative 1 − tanh²(S / c) at the scores before the cap."""
    bounded = namespace(scores).tanh(scores / cap)
    return (1.0 - bounded) * (1.0 + bounded)
