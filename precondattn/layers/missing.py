"""The error that lists all inputs without a recipe, with recipes that would fit."""

from __future__ import annotations

import math
from collections.abc import Mapping

from precondattn.algebra.declaration import Pattern

OWN = "..."

FITTING = {
    (True, None, None): "Projection()",
    (True, -math.inf, 0): "LogSigmoid()",
    (True, 0, 1): "Sigmoid()",
    (False, None, None): "Learned()",
    (False, 0, math.inf): "Positive()",
}
"""The recipe for an input, by (whether it has a time axis, lower bound, upper bound)."""


def missing_recipes(mechanism: object, patterns: Mapping[str, Pattern]) -> TypeError:
    """The error for a mechanism with inputs, given by name and pattern, that have no recipe."""
    names, example = [*patterns], {name: fitting(pattern) for name, pattern in patterns.items()}
    shown = ", ".join(f"{name!r}: {recipe}" for name, recipe in example.items())
    found = (
        f"there is none for the input {names[0]}"
        if len(names) == 1
        else f"there are none for the inputs {', '.join(names[:-1])} and {names[-1]}"
    )
    classes = sorted({recipe.partition("(")[0] for recipe in example.values()} - {OWN})
    notes = [f"from precondattn.layers.recipes import {', '.join(classes)}"] if classes else []
    if OWN in example.values():
        notes.append(f"{OWN} is a precondattn.layers.recipe.Recipe of your own")
    return TypeError(
        f"recipes: {found} of {mechanism}; pass recipes={{{shown}}}, for example "
        f"({'; '.join(notes)})"
    )


def fitting(pattern: Pattern) -> str:
    """The text of a recipe with the shape and the range of an input; `OWN` if there is none."""
    has_tokens = pattern.time_axis is not None
    if pattern.is_pairwise or (pattern.unit and not has_tokens):
        return OWN
    if pattern.unit:
        return "UnitConvolution()"
    if has_tokens and pattern.low == 0 and pattern.high not in (None, 1, math.inf):
        return f"Sigmoid({pattern.high})"
    return FITTING.get((has_tokens, pattern.low, pattern.high), OWN)
