"""The sizes of a layer: from its arguments to the sizes of a mechanism's letters.

The patterns of q, k and v determine which letters are heads and widths:

    q: b t h d      k: b s n d      v: b s n e  or  b s u e

If a mechanism has logits in place of queries and keys, the heads of the logits count as query
heads, and the heads of the values as key heads.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from precondattn.algebra.declaration import FIXED, HEADS, Axis, Pattern
from precondattn.algebra.mechanism import Mechanism
from precondattn.given import Given, whole_number
from precondattn.layers.parameters import MODEL

WIDTH = "embed"
"""The letter for the width of the hidden states, which no mechanism uses."""
NAMES = {WIDTH: "embed", "m": "slots"}
"""The usual names of axes other than heads; rules for names shard parameters."""


class Sizes(NamedTuple):
    """The size of each letter of a mechanism, and the axes for the letters of recipes."""

    by_letter: dict[str, int]
    roles: dict[str, Axis]
    """The axis of each recipe letter: x, d, e (widths of x, keys, values), u (value heads)."""
    names: dict[str, str]
    """The usual name of each letter, for sharding."""


class LayerSizes(NamedTuple):
    """The arguments of a layer that are sizes; None for the default."""

    width: int
    heads: int
    kv_heads: int | None = None
    value_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    slots: int | None = None


def sizes_of(mechanism: Mechanism, numbers: LayerSizes) -> Sizes:
    """The sizes of all letters."""
    counts = {name: None if n is None else count(name, n) for name, n in numbers._asdict().items()}
    width, heads = (count(name, counts[name]) for name in ("width", "heads"))
    _, _, kv_heads, value_heads, head_dim, value_dim, slots = counts.values()
    q, k, v = _rows(mechanism)
    of_q, of_k, of_v = (_heads(pattern).letter for pattern in (q, k, v))
    letters = {axis.letter for pattern in mechanism.inputs.values() for axis in pattern.axes}
    if kv_heads is not None and of_k == of_q and kv_heads != heads:
        raise ValueError(
            f"kv_heads: {mechanism} has as many key heads as query heads, {heads}; found {kv_heads}"
        )
    if value_heads is not None and of_v in (of_q, of_k):
        raise ValueError(
            f"value_heads: {mechanism} has no value heads of its own; found {value_heads}"
        )
    if slots is not None and "m" not in letters:
        raise ValueError(f"slots: {mechanism} has none; found {slots}")
    pairs = 2 if mechanism.offers.paired else 1
    if head_dim is None:
        if width % (heads * pairs):
            raise ValueError(
                f"heads: {heads * pairs} query heads must divide the width {width}, or head_dim be "
                f"given; found heads={heads}"
            )
        head_dim = width // (heads * pairs)
    of_d, of_e = k.axes[-1].letter, v.axes[-1].letter
    if of_e == of_d:
        if value_dim not in (None, head_dim):
            raise ValueError(
                f"value_dim: {mechanism} has values as wide as keys, {head_dim}; found {value_dim}"
            )
        value_dim = head_dim
    kv_heads = kv_heads or heads
    value_heads = value_heads or heads
    numbers_of_heads = {"kv_heads": kv_heads, "heads": heads, "value_heads": value_heads}
    for (few, n), (many, m) in pairwise(numbers_of_heads.items()):
        if m % n:
            raise ValueError(f"{few} must divide {many}; found {few}={n} and {many}={m}")
    sizes = {
        of_d: head_dim,
        of_e: value_dim or head_dim * pairs,
        of_v: value_heads,
        of_k: kv_heads,
        of_q: heads,
        WIDTH: width,
        "m": slots or head_dim,
        FIXED: 1,
    }
    # If letters are equal, the last one counts: values may have the heads of keys.
    widths = {of_d: "head_dim", of_e: "head_dim"}
    names = {**NAMES, **widths, of_v: "heads", of_k: "kv_heads", of_q: "heads"}
    roles = {MODEL: Axis(WIDTH), "d": k.axes[-1], "e": v.axes[-1]}
    roles |= {"h": _heads(q), "u": _heads(v)}
    return Sizes(sizes, roles, names)


def _rows(mechanism: Mechanism) -> tuple[Pattern, Pattern, Pattern]:
    declared = (leaf.recurrence for leaf in mechanism.program.leaves)
    of_gate = any(each is not None and each.keys == "of the gate" for each in declared)
    names = ("q", "g" if of_gate else "k", "v")
    if "logits" in mechanism.inputs:
        names = ("logits", "v", "v")
    missing = [name for name in names if name not in mechanism.inputs]
    if missing:
        raise TypeError(f"mechanism: {mechanism} has no input {missing[0]}, and no layer")
    q, k, v = (mechanism.inputs[name] for name in names)
    return q, k, v


def _heads(pattern: Pattern) -> Axis:
    return next(axis for axis in pattern.axes if axis.letter in HEADS)


def count(name: str, value: Given) -> int:
    """A whole number, 1 or above, as Python's."""
    number = whole_number(value)
    if number is None:
        raise TypeError(f"{name} must be a whole number; found {value!r}")
    if number < 1:
        raise ValueError(f"{name} must be 1 or above; found {number}")
    return number
