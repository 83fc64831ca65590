"""Which softmax attention can be divided by gathering its keys, in every framework."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Leaf


def refusal(leaf: Leaf) -> str | None:
    """Why keys are not gathered; None where they are."""
    for name, pattern in leaf.inputs.items():
        if {"t", "s"} <= set(pattern.letters):
            return f"divides tokens, and {name} of {leaf} is of pairs"
    if not leaf.offers.causal:
        return f"gathers the keys before a query, and {leaf} is not causal"
    return None


def gathered_inputs(leaf: Leaf) -> list[str]:
    """The inputs that belong to keys."""
    return [name for name, pattern in leaf.inputs.items() if "s" in pattern.letters]
