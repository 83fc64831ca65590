"""The leaves that compute each token alone, for PyTorch and JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Leaf


def refusal(leaf: Leaf) -> str | None:
    """The reason why a leaf needs other tokens; None if it computes each token alone."""
    if not leaf.offers.causal:
        return f"divides tokens, and {leaf} is computed of all"
    return None
