"""The factors that a kernel's code branches on, their levels, and which levels are compatible.

A row of the design (`rows.py`) has one level of each factor that its mechanism has. B is the size
of a block: one of those that the backend declares (`Backend.blocks`), or of 16, 32, 64 and 128.
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn_conformance.memory_order import ORDERS

BLOCKS = (16, 32, 64, 128)
"""Default block sizes, at whose edges levels are placed; a backend may declare its own."""

VERBS = {
    "forward": "outputs",
    "vjp": "gradients",
    "extend": "caching",
    "extend_vjp": "states",
}
"""The check that covers each verb."""

TOKENS = {
    "one": (0, 1),
    "less": (1, -1),
    "edge": (1, 0),
    "more": (1, 1),
    "two": (2, 1),
    "three": (3, 5),
    "long": (0, 1025),
    "longest": (0, 2049),
}
"""The number of keys of each level of `time`, in blocks and in tokens more."""

BROADCAST = {"no axis": "", "over b": "b", "over h": "h", "over b and h": "bh"}
"""The axes along which an additive bias is broadcast, by the level of `bias`."""

FACTORS: dict[str, tuple[str, ...]] = {
    "verb": tuple(VERBS),
    "time": tuple(TOKENS),
    "mask": (
        *("none", "lengths_apart", "lengths_edge", "key_blocks", "key_start", "segment_ids"),
        *("segments_edge", "segments_long", "lengths_apart+key_blocks"),
        *("lengths_edge+segments_long", "key_blocks+segments_edge"),
    ),
    "heads": ("1/1", "3/3", "4/2", "6/1", "6/2"),
    "block": tuple(map(str, BLOCKS)),
    "queries": ("all", "fewer", "single"),
    "batch": ("1", "2", "3"),
    "d": ("5", "16", "64", "128", "256"),
    "e": ("3", "16", "72", "128", "256"),
    "values": ("1", "2"),
    "order": ("contiguous", *ORDERS),
    "bias": tuple(BROADCAST),
    "dtype": ("float64", "float32", "bfloat16", "float16"),
    "data": ("clustered", "random", "duplicate", "zero"),
    "option": (),
    "second": (),
}
"""The levels of each factor. There are as many queries as keys, fewer by half a block and one, or
one. Options are those of the mechanism, or of its base (`options.py`); `second` is another one at
the same time."""

TRIPLES = ("time", "mask", "verb", "heads")
"""Factors of which every compatible triple of levels is in a row."""

NONE = "none"
"""The level of `option` and of `second` for the mechanism without options."""

PACKED = tuple(level for level in FACTORS["mask"] if "segment" in level)
AT_BLOCKS = tuple(level for level in FACTORS["mask"] if level not in ("none", "lengths_edge"))
CACHES = ("extend", "extend_vjp")
FEWER = ("fewer", "single")
LONG = ("long", "longest")


class Apart(NamedTuple):
    """Levels of one factor that are incompatible with levels of another."""

    factor: str
    levels: tuple[str, ...]
    other: str
    others: tuple[str, ...]


def _only(levels: tuple[str, ...], factor: str, **allowed: str) -> list[Apart]:
    """Levels of one factor that are compatible only with the allowed levels of others."""
    others = {x: [y for y in FACTORS[x] if y not in allowed[x].split()] for x in allowed}
    return [Apart(factor, levels, other, tuple(excluded)) for other, excluded in others.items()]


APART = (
    # A cache contains one sequence per row, and its new tokens are queries and keys.
    Apart("verb", CACHES, "mask", PACKED),
    Apart("verb", CACHES, "queries", FEWER),
    # One token has no block's edge.
    Apart("time", ("one",), "mask", AT_BLOCKS),
    Apart("time", ("one",), "queries", FEWER),
    # The oracle is quadratic, and there would be too many small blocks.
    *_only(LONG, "time", batch="1", heads="1/1 4/2", d="5 16 64", e="3 16 72", block="64 128"),
    *_only(LONG, "time", mask="none lengths_apart key_blocks segments_long"),
    *_only(("longest",), "time", verb="forward vjp", heads="1/1", d="16", e="16 72"),
    *_only(("longest",), "time", dtype="float32"),
    # A state of this width is large.
    Apart("d", ("256",), "e", ("128", "256")),
    *_only(("256",), "d", batch="1", heads="1/1 4/2", values="1"),
    *_only(("256",), "e", batch="1", heads="1/1 4/2", d="5 16 64", values="1"),
    # No other key is similar, and equal keys get no gradient.
    Apart("d", ("128", "256"), "data", ("duplicate",)),
    # One sequence and one head can not be expanded.
    Apart("batch", ("1",), "order", ("expanded_batch",)),
    Apart("batch", ("1",), "bias", ("over b", "over b and h")),
    Apart("heads", ("1/1",), "order", ("expanded_heads",)),
    Apart("heads", ("1/1",), "bias", ("over h", "over b and h")),
)
"""Incompatible levels for every mechanism. `rows.py` adds those that a declaration excludes."""
