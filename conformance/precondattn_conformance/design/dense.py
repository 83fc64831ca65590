"""The first rows of a design, which `smoke` runs. Few faulty kernels give a right result in them.

A kernel that is wrong for a second mask, wide values or the third sequence is wrong in one row
that has all of these. So these rows are dense: masks at a block's edges, three sequences, groups
of three heads, widths that differ, and views. The covering array (`covering.py`) begins with them,
and chooses the levels that they leave open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Any

from precondattn_conformance.design.covering import Row
from precondattn_conformance.design.factors import NONE
from precondattn_conformance.design.options import WIDE, together

SMALLEST, MIDDLE, LARGEST = 0, -2, -1
"""Indices into the block sizes, for the size that a row uses. With one size, all give that one."""

COLUMNS = (
    *("block", "time", "mask", "verb", "dtype", "heads", "batch", "d", "e"),
    *("queries", "order", "bias", "values"),
)
"""The factors of `DENSE` in order of importance: of two incompatible levels, the first is kept. A
block is an index. Empty levels, and those at the end of a row, are left open."""

DENSE: tuple[tuple[Any, ...], ...] = (
    # Two masks that change at blocks' edges; wide values; several query heads per key head.
    (
        *(SMALLEST, "three", "key_blocks+segments_edge", "vjp", "float32"),
        *("6/2", "3", "16", "72", "all", "expanded_heads", "over b"),
    ),
    # Fewer queries, two blocks and one token, a cache as long as that of the first sequence.
    (
        *(MIDDLE, "two", "lengths_apart+key_blocks", "vjp", "float32"),
        *("4/2", "2", "16", "16", "fewer", "expanded_batch", "over h"),
    ),
    # Decoding in ragged sequences, across block edges.
    (
        *(SMALLEST, "three", "lengths_apart", "extend", "float32"),
        *("6/2", "3", "5", "16", "", "heads_first"),
    ),
    # A segment longer than two blocks.
    (
        *(MIDDLE, "three", "segments_long", "vjp", "float64"),
        *("3/3", "1", "16", "3", "all", "expanded_tokens"),
    ),
    # The gradient of a first state, after whole blocks.
    (SMALLEST, "edge", "none", "extend_vjp", "float32", "4/2", "2", "16", "72", "", "window"),
    # A long sequence: the block number has four bits, and one row is left over.
    (
        *(LARGEST, "long", "none", "forward", "float32"),
        *("1/1", "1", "16", "16", "all", "contiguous", "", "1"),
    ),
    # A long cache: a count of tokens in bfloat16 is no longer exact.
    (LARGEST, "three", "none", "extend", "float64", "1/1", "1", "16", "16", "", "contiguous"),
    # Caches that end at a block's edge, and a sequence without tokens.
    (
        *(SMALLEST, "more", "lengths_edge", "extend", "float64"),
        *("3/3", "3", "16", "3", "", "every_other_element"),
    ),
    # Padding on the left, and wide keys.
    (SMALLEST, "three", "key_start", "vjp", "float32", "4/2", "1", "256", "16", "fewer"),
    # Two masks, of which one ends and one begins; wide values.
    (
        *(SMALLEST, "three", "lengths_edge+segments_long", "vjp", "float32"),
        *("4/2", "1", "16", "256", "all"),
    ),
    # Keys and gates that are stored once for all sequences, as wide as values; no masks.
    (
        *(SMALLEST, "more", "none", "vjp", "float32"),
        *("4/2", "3", "16", "16", "all", "expanded_batch", "", "1"),
    ),
    # Half precision over several blocks.
    (SMALLEST, "three", "lengths_apart", "vjp", "float16", "4/2", "2", "16", "16", "all"),
    # One query.
    (SMALLEST, "two", "key_blocks", "forward", "float32", "6/1", "3", "64", "16", "single"),
)


def first_rows(options: Sequence[str], paired_options: str, blocks: Sequence[str]) -> Iterator[Row]:
    """The wanted levels of the first rows, for the mechanism alone and with pairs of options.

    `paired_options` is the expression whose options are combined in pairs; empty for none.
    """
    for dense in DENSE:
        number, *named = dense
        levels = {f: level for f, level in zip(COLUMNS[1:], named, strict=False) if level}
        block = blocks[number if -number <= len(blocks) else 0]
        yield {"option": NONE, "second": NONE, "data": "clustered", "block": block, **levels}
    options = [option for option in options if option != NONE]
    usual = {"block": blocks[SMALLEST], "heads": "4/2", "queries": "all"}
    if not paired_options:
        # Another eps of an inner piece changes few digits, so it is in float64.
        of_an_eps = {"dtype": "float64", "verb": "vjp", "time": "more", "mask": "none"}
        sizes = {"batch": "1", "d": "5", "e": "3", "data": "random"}
        yield from ({"option": option, **of_an_eps, **usual, **sizes} for option in options)
        return
    usual |= {"time": "three", "dtype": "float32", "data": "clustered"}
    usual |= {"batch": "2", "d": "16", "e": "16"}
    for number, (one, other) in enumerate(_option_pairs(paired_options, options)):
        mask = ("lengths_apart", "none", "key_blocks")[number % 3]
        for verb in ("vjp", "extend") if f"window={WIDE}" in one else ("vjp",):
            yield {"option": one, "second": other, "verb": verb, "mask": mask, **usual}


def _option_pairs(expression: str, options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A window wider than a block with every other option, and each other with the next."""
    wide = [option for option in options if f"window={WIDE}" in option]
    others = [option for option in options if option not in wide]
    yield from (pair for pair in product(wide, options) if together(expression, *pair))
    paired = set()
    for one, other in pairwise(others):
        if one not in paired and together(expression, one, other) is not None:
            paired |= {one, other}
            yield one, other
    yield from ((option, NONE) for option in others if option not in paired)
