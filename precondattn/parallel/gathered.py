"""The softmax attention that is divided by gathering all keys, for PyTorch and JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Leaf


def refusal(leaf: Leaf) -> str | None:
    """The reason why a leaf can not be divided by gathering its keys; None if it can."""
    for name, pattern in leaf.inputs.items():
        if {"t", "s"} <= set(pattern.letters):
            return f"divides tokens, and {name} of {leaf} is of pairs"
    if not leaf.offers.causal:
        return f"gathers the keys before a query, and {leaf} is not causal"
    return None


def gathered_inputs(leaf: Leaf) -> list[str]:
    """The names of the inputs that have a row for each key."""
    return [name for name, pattern in leaf.inputs.items() if "s" in pattern.letters]
