"""The factors that a kernel's code branches on, their levels, and which levels are compatible.

A row of the design (`rows.py`) has one level of each factor that its mechanism has. B is the size
of a block: one of those that the backend declares (`Backend.blocks`), or of 16, 32, 64 and 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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


class Factor(NamedTuple):
    """A factor with its description, and its levels with the meaning of each."""

    what: str
    levels: dict[str, str]


def _as_they_are(*levels: str) -> dict[str, str]:
    return {level: level for level in levels}


FACTORS: dict[str, Factor] = {
    "verb": Factor("the verb, with the check that covers it", VERBS),
    "time": Factor(
        "number of keys, relative to block edges",
        {
            "one": "1",
            "less": "B - 1",
            "edge": "B",
            "more": "B + 1",
            "two": "2B + 1",
            "three": "3B + 5",
            "long": "1025",
            "longest": "2049",
        },
    ),
    "mask": Factor(
        "masks, one or two at once (`masks.py`)",
        {
            "none": "",
            **_as_they_are(
                "lengths_apart",
                "lengths_edge",
                "key_blocks",
                "key_start",
                "segment_ids",
                "segments_edge",
                "segments_long",
                "lengths_apart+key_blocks",
                "lengths_edge+segments_long",
                "key_blocks+segments_edge",
            ),
        },
    ),
    "heads": Factor(
        "query heads and key/value heads", _as_they_are("1/1", "3/3", "4/2", "6/1", "6/2")
    ),
    "block": Factor("B", _as_they_are(*map(str, BLOCKS))),
    "queries": Factor(
        "number of queries, relative to keys",
        {"all": "as many", "fewer": "less by half a block and one", "single": "1"},
    ),
    "batch": Factor("b", _as_they_are("1", "2", "3")),
    "d": Factor("width of keys", _as_they_are("5", "16", "64", "128", "256")),
    "e": Factor("width of values", _as_they_are("3", "16", "72", "128", "256")),
    "values": Factor("value heads per query head", _as_they_are("1", "2")),
    "order": Factor(
        "order in memory (`memory_order.py`)",
        {
            "contiguous": "",
            **_as_they_are(
                "heads_first",
                "every_other_element",
                "window",
                "expanded_batch",
                "expanded_heads",
                "expanded_tokens",
            ),
        },
    ),
    "bias": Factor(
        "axes along which an additive bias is broadcast",
        {"no axis": "", "over b": "b", "over h": "h", "over b and h": "bh"},
    ),
    "dtype": Factor("dtype", _as_they_are("float64", "float32", "bfloat16", "float16")),
    "data": Factor("kind of keys", _as_they_are("clustered", "random", "duplicate", "zero")),
    "option": Factor("an option of the mechanism, or of its base (`options.py`)", {}),
    "second": Factor("another option at the same time", {}),
}

TRIPLES = ("time", "mask", "verb", "heads")
"""Factors of which every compatible triple of levels is in a row."""

NONE = "none"
"""The level of `option` and of `second` for the mechanism without options."""

PACKED = tuple(level for level in FACTORS["mask"].levels if "segment" in level)
AT_BLOCKS = tuple(
    level for level in FACTORS["mask"].levels if level not in ("none", "lengths_edge")
)
CACHES = ("extend", "extend_vjp")
FEWER = ("fewer", "single")
LONG = ("long", "longest")


class IncompatibleLevels(NamedTuple):
    """Levels of one factor that are incompatible with levels of another, and the reason."""

    factor: str
    levels: tuple[str, ...]
    other: str
    others: tuple[str, ...]
    why: str


def _only(
    factor: str, levels: tuple[str, ...], other: str, allowed: tuple[str, ...], why: str
) -> IncompatibleLevels:
    """Levels of one factor that are compatible only with the allowed levels of another."""
    others = tuple(level for level in FACTORS[other].levels if level not in allowed)
    return IncompatibleLevels(factor, levels, other, others, why)


_DEAR = "the oracle is quadratic"
_WIDE = "a state of this width is large"
_ORTHOGONAL = "no other key is similar, and equal keys get no gradient"
APART = (
    IncompatibleLevels("verb", CACHES, "mask", PACKED, "a cache contains one sequence per row"),
    IncompatibleLevels("verb", CACHES, "queries", FEWER, "new tokens are queries and keys"),
    IncompatibleLevels("time", ("one",), "mask", AT_BLOCKS, "there is no block's edge"),
    IncompatibleLevels("time", ("one",), "queries", FEWER, "there is one key"),
    _only("time", LONG, "batch", ("1",), _DEAR),
    _only("time", LONG, "heads", ("1/1", "4/2"), _DEAR),
    _only("time", LONG, "d", ("5", "16", "64"), _DEAR),
    _only("time", LONG, "e", ("3", "16", "72"), _DEAR),
    _only("time", LONG, "block", ("64", "128"), "there are too many blocks"),
    _only("time", LONG, "mask", ("none", "lengths_apart", "key_blocks", "segments_long"), _DEAR),
    _only("time", ("longest",), "verb", ("forward", "vjp"), _DEAR),
    _only("time", ("longest",), "heads", ("1/1",), _DEAR),
    _only("time", ("longest",), "d", ("16",), _DEAR),
    _only("time", ("longest",), "e", ("16", "72"), _DEAR),
    _only("time", ("longest",), "dtype", ("float32",), _DEAR),
    _only("time", ("longest",), "option", ("none",), _DEAR),
    _only("d", ("256",), "batch", ("1",), _WIDE),
    _only("d", ("256",), "heads", ("1/1", "4/2"), _WIDE),
    _only("d", ("256",), "e", ("3", "16", "72"), _WIDE),
    _only("d", ("256",), "values", ("1",), _WIDE),
    _only("e", ("256",), "batch", ("1",), _WIDE),
    _only("e", ("256",), "heads", ("1/1", "4/2"), _WIDE),
    _only("e", ("256",), "d", ("5", "16", "64"), _WIDE),
    _only("e", ("256",), "values", ("1",), _WIDE),
    IncompatibleLevels("d", ("128", "256"), "data", ("duplicate",), _ORTHOGONAL),
    IncompatibleLevels(
        "batch", ("1",), "order", ("expanded_batch",), "one sequence can not be expanded"
    ),
    IncompatibleLevels("batch", ("1",), "bias", ("over b", "over b and h"), "one sequence"),
    IncompatibleLevels(
        "heads", ("1/1",), "order", ("expanded_heads",), "one head can not be expanded"
    ),
    IncompatibleLevels("heads", ("1/1",), "bias", ("over h", "over b and h"), "one head"),
)
"""Incompatible levels for every mechanism. `rows.py` adds those that a declaration excludes."""


@dataclass(frozen=True)
class Apartness:
    """A lookup of incompatible levels: `APART` and further entries."""

    lines: tuple[IncompatibleLevels, ...]

    @cached_property
    def pairs(self) -> frozenset[tuple[tuple[str, str], tuple[str, str]]]:
        """Every two incompatible levels, in both orders."""
        pairs = {
            ((line.factor, level), (line.other, other))
            for line in self.lines
            for level in line.levels
            for other in line.others
        }
        return frozenset(pairs | {(other, one) for one, other in pairs})

    def __call__(self, one: tuple[str, str], other: tuple[str, str]) -> bool:
        """Whether two levels are incompatible."""
        return (one, other) in self.pairs
