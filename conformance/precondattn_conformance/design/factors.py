"""The factors that a kernel's code branches on, their levels, and which levels go together.

A row of the design (`rows.py`) has one level of each factor that its mechanism has. B is the size
of a block: one of those that the backend declares (`Backend.blocks`), or of 16, 32, 64 and 128.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

BLOCKS = (16, 32, 64, 128)
"""The sizes of blocks at whose edges levels are placed, unless a backend declares its own."""

VERBS = {
    "forward": "outputs",
    "vjp": "gradients",
    "extend": "caching",
    "extend_vjp": "states",
}
"""The check that looks at each verb."""


class Factor(NamedTuple):
    """A factor: what it is, and its levels with the meaning of each."""

    what: str
    levels: dict[str, str]


def _as_they_are(*levels: str) -> dict[str, str]:
    return {level: level for level in levels}


FACTORS: dict[str, Factor] = {
    "verb": Factor("the verb, and the check that looks at it", VERBS),
    "time": Factor(
        "keys, against the edges of blocks",
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
        "queries against keys",
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
"""Every triple of levels of these factors that goes together is in a row."""

NONE = "none"
"""The level of `option` and of `second` for the mechanism as it is."""

PACKED = tuple(level for level in FACTORS["mask"].levels if "segment" in level)
AT_BLOCKS = tuple(
    level for level in FACTORS["mask"].levels if level not in ("none", "lengths_edge")
)
CACHES = ("extend", "extend_vjp")
FEWER = ("fewer", "single")
LONG = ("long", "longest")


class IncompatibleLevels(NamedTuple):
    """Levels of one factor that do not go together with levels of another, and why."""

    factor: str
    levels: tuple[str, ...]
    other: str
    others: tuple[str, ...]
    why: str


def _only(
    factor: str, levels: tuple[str, ...], other: str, allowed: tuple[str, ...], why: str
) -> IncompatibleLevels:
    """These levels go together with the allowed ones only."""
    others = tuple(level for level in FACTORS[other].levels if level not in allowed)
    return IncompatibleLevels(factor, levels, other, others, why)


_DEAR = "the oracle is quadratic"
_WIDE = "so wide a state is large"
_ORTHOGONAL = "no other key is near, and equal keys get no gradient"
APART = (
    IncompatibleLevels("verb", CACHES, "mask", PACKED, "a cache holds one sequence in a row"),
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
        "batch", ("1",), "order", ("expanded_batch",), "one sequence is no expanded one"
    ),
    IncompatibleLevels("batch", ("1",), "bias", ("over b", "over b and h"), "one sequence"),
    IncompatibleLevels(
        "heads", ("1/1",), "order", ("expanded_heads",), "one head is no expanded one"
    ),
    IncompatibleLevels("heads", ("1/1",), "bias", ("over h", "over b and h"), "one head"),
)
"""What does not go together for any mechanism. `rows.py` adds what its declaration excludes."""


@dataclass(frozen=True)
class Apartness:
    """A lookup of `APART`, with further lines."""

    lines: tuple[IncompatibleLevels, ...]

    @cached_property
    def pairs(self) -> frozenset[tuple[tuple[str, str], tuple[str, str]]]:
        """Every two levels that do not go together, in both orders."""
        pairs = {
            ((line.factor, level), (line.other, other))
            for line in self.lines
            for level in line.levels
            for other in line.others
        }
        return frozenset(pairs | {(other, one) for one, other in pairs})

    def __call__(self, one: tuple[str, str], other: tuple[str, str]) -> bool:
        """Whether two levels do not go together."""
        return (one, other) in self.pairs
