"""Which leaves compute each token by itself, in every framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Leaf


def refusal(leaf: Leaf) -> str | None:
    """Why a leaf needs all tokens; None where any order of them will do."""
    if not leaf.offers.causal:
        return f"divides tokens, and {leaf} is computed of all"
    return None
