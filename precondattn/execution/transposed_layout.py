"""Advice in errors for arrays in the layout (b, h, t, d) of other libraries."""

from __future__ import annotations

from collections.abc import Mapping

from precondattn.algebra.declaration import HEADS, Inputs, Pattern, ShapeError, Sizes
from precondattn.arrays import Shape


def advice(declared: Inputs, shapes: Mapping[str, Shape], known: Sizes, *, causal: bool) -> str:
    """A hint for a ShapeError; empty unless the shapes fit with the token and head axes swapped."""
    rows = {name for name, shape in shapes.items() if len(shape) > 3}
    for exchanged in (shapes.keys(), rows):
        others = {
            name: (shape[0], shape[2], shape[1], *shape[3:])
            if name in exchanged and _has_both_axes(declared[name], shape)
            else shape
            for name, shape in shapes.items()
        }
        try:
            sizes = declared.sizes("", others, known)
        except ShapeError:
            continue
        tokens = sizes.get("t", sizes.get("s", 0))
        keys, heads = sizes.get("s", tokens), [sizes[x] for x in HEADS if x in sizes]
        if tokens > max(heads, default=tokens) and (tokens <= keys or not causal):
            names = ", ".join(name for name in shapes if others[name] != shapes[name])
            return (
                f"; these shapes fit with the axes 1 and 2 of {names} exchanged: here the layout "
                f"is (b, t, h, d), and not (b, h, t, d)"
            )
    return ""


def _has_both_axes(pattern: Pattern, shape: Shape) -> bool:
    """Whether tokens and heads are axes 1 and 2 of an array."""
    letters = pattern.letters
    return len(shape) == len(letters) > 2 and letters[1] in "ts" and letters[2] in HEADS
