"""The factors that a kernel's code branches on, their levels, and which levels are compatible.

A row of the design (`rows.py`) has one level of each factor that its mechanism has. B is the size
of a block: one of those that the backend declares (`Backend.blocks`), or of 16, 32, 64 and 128.
"""

from __future__ import annotations

from typing import NamedTuple

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
    "one": ("1", 0, 1),
    "less": ("B - 1", 1, -1),
    "edge": ("B", 1, 0),
    "more": ("B + 1", 1, 1),
    "two": ("2B + 1", 2, 1),
    "three": ("3B + 5", 3, 5),
    "long": ("1025", 0, 1025),
    "longest": ("2049", 0, 2049),
}
"""The number of keys of each level of `time`: in words, in blocks, and in tokens more."""


class Factor(NamedTuple):
    """A factor with its description, and its levels with the meaning of each."""

    what: str
    levels: dict[str, str]


def _literal(*levels: str) -> dict[str, str]:
    return {level: level for level in levels}


FACTORS: dict[str, Factor] = {
    "verb": Factor("the verb, with the check that covers it", VERBS),
    "time": Factor(
        "number of keys, relative to block edges",
        {level: words for level, (words, _, _) in TOKENS.items()},
    ),
    "mask": Factor(
        "masks, one or two at once (`masks.py`)",
        {"none": ""}
        | _literal("lengths_apart", "lengths_edge", "key_blocks", "key_start", "segment_ids")
        | _literal("segments_edge", "segments_long", "lengths_apart+key_blocks")
        | _literal("lengths_edge+segments_long", "key_blocks+segments_edge"),
    ),
    "heads": Factor("query heads and key/value heads", _literal("1/1", "3/3", "4/2", "6/1", "6/2")),
    "block": Factor("B", _literal(*map(str, BLOCKS))),
    "queries": Factor(
        "number of queries, relative to keys",
        {"all": "as many", "fewer": "less by half a block and one", "single": "1"},
    ),
    "batch": Factor("b", _literal("1", "2", "3")),
    "d": Factor("width of keys", _literal("5", "16", "64", "128", "256")),
    "e": Factor("width of values", _literal("3", "16", "72", "128", "256")),
    "values": Factor("value heads per query head", _literal("1", "2")),
    "order": Factor(
        "order in memory (`memory_order.py`)",
        {"contiguous": ""}
        | _literal("heads_first", "every_other_element", "window")
        | _literal("expanded_batch", "expanded_heads", "expanded_tokens"),
    ),
    "bias": Factor(
        "axes along which an additive bias is broadcast",
        {"no axis": "", "over b": "b", "over h": "h", "over b and h": "bh"},
    ),
    "dtype": Factor("dtype", _literal("float64", "float32", "bfloat16", "float16")),
    "data": Factor("kind of keys", _literal("clustered", "random", "duplicate", "zero")),
    "option": Factor("an option of the mechanism, or of its base (`options.py`)", {}),
    "second": Factor("another option at the same time", {}),
}

TRIPLES = ("time", "mask", "verb", "heads")
"""Factors of which every compatible triple of levels is in a row."""

NONE = "none"
"""The level of `option` and of `second` for the mechanism without options."""

MASKS = tuple(FACTORS["mask"].levels)
PACKED = tuple(level for level in MASKS if "segment" in level)
AT_BLOCKS = tuple(level for level in MASKS if level not in ("none", "lengths_edge"))
CACHES = ("extend", "extend_vjp")
FEWER = ("fewer", "single")
LONG = ("long", "longest")


class Apart(NamedTuple):
    """Levels of one factor that are incompatible with levels of another, and the reason."""

    factor: str
    levels: tuple[str, ...]
    other: str
    others: tuple[str, ...]
    why: str


def _only(levels: tuple[str, ...], factor: str, why: str, **allowed: str) -> list[Apart]:
    """Levels of one factor that are compatible only with the allowed levels of others."""
    others = {x: [y for y in FACTORS[x].levels if y not in allowed[x].split()] for x in allowed}
    return [
        Apart(factor, levels, other, tuple(excluded), why) for other, excluded in others.items()
    ]


_DEAR = "the oracle is quadratic"
_WIDE = "a state of this width is large"
_ORTHOGONAL = "no other key is similar, and equal keys get no gradient"
APART = (
    Apart("verb", CACHES, "mask", PACKED, "a cache contains one sequence per row"),
    Apart("verb", CACHES, "queries", FEWER, "new tokens are queries and keys"),
    Apart("time", ("one",), "mask", AT_BLOCKS, "there is no block's edge"),
    Apart("time", ("one",), "queries", FEWER, "there is one key"),
    *_only(LONG, "time", _DEAR, batch="1", heads="1/1 4/2", d="5 16 64", e="3 16 72"),
    *_only(LONG, "time", _DEAR, mask="none lengths_apart key_blocks segments_long"),
    *_only(LONG, "time", "there are too many blocks", block="64 128"),
    *_only(("longest",), "time", _DEAR, verb="forward vjp", heads="1/1", d="16", e="16 72"),
    *_only(("longest",), "time", _DEAR, dtype="float32"),
    Apart("d", ("256",), "e", ("128", "256"), _WIDE),
    *_only(("256",), "d", _WIDE, batch="1", heads="1/1 4/2", values="1"),
    *_only(("256",), "e", _WIDE, batch="1", heads="1/1 4/2", d="5 16 64", values="1"),
    Apart("d", ("128", "256"), "data", ("duplicate",), _ORTHOGONAL),
    Apart("batch", ("1",), "order", ("expanded_batch",), "one sequence can not be expanded"),
    Apart("batch", ("1",), "bias", ("over b", "over b and h"), "one sequence"),
    Apart("heads", ("1/1",), "order", ("expanded_heads",), "one head can not be expanded"),
    Apart("heads", ("1/1",), "bias", ("over h", "over b and h"), "one head"),
)
"""Incompatible levels for every mechanism. `rows.py` adds those that a declaration excludes."""
