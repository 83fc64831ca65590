"""The first rows of a design, which `smoke` runs. Few faulty kernels give a right result in them.

A kernel that is wrong for a second mask, wide values or the third sequence is wrong in one row
that has all of these. So these rows are dense: masks at a block's edges, three sequences, groups
of three heads, widths that differ, and views. The covering array (`covering.py`) begins with them,
and chooses the levels that they leave open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from precondattn_conformance.design.covering import Row
from precondattn_conformance.design.factors import NONE
from precondattn_conformance.design.options import WIDE, together

SMALLEST, MIDDLE, LARGEST = 0, -2, -1
"""Indices into the block sizes, for the size that a row uses. With one size, all give that one."""

_PLAIN = {"option": NONE, "second": NONE, "data": "clustered"}


def _row(block: int, **levels: str) -> tuple[int, Row]:
    """A row's levels in order of importance: if two are incompatible, the first is kept."""
    return block, {**_PLAIN, **levels}


DENSE: tuple[tuple[int, Row], ...] = (
    # Two masks that change at blocks' edges; wide values; several query heads per key head.
    _row(
        SMALLEST,
        time="three",
        mask="key_blocks+segments_edge",
        verb="vjp",
        dtype="float32",
        heads="6/2",
        batch="3",
        d="16",
        e="72",
        order="expanded_heads",
        bias="over b",
        queries="all",
    ),
    # Fewer queries, two blocks and one token, a cache as long as that of the first sequence.
    _row(
        MIDDLE,
        time="two",
        mask="lengths_apart+key_blocks",
        verb="vjp",
        dtype="float32",
        queries="fewer",
        heads="4/2",
        batch="2",
        d="16",
        e="16",
        order="expanded_batch",
        bias="over h",
    ),
    # Decoding in ragged sequences, across block edges.
    _row(
        SMALLEST,
        time="three",
        mask="lengths_apart",
        verb="extend",
        dtype="float32",
        heads="6/2",
        batch="3",
        d="5",
        e="16",
        order="heads_first",
    ),
    # A segment longer than two blocks.
    _row(
        MIDDLE,
        time="three",
        mask="segments_long",
        verb="vjp",
        dtype="float64",
        heads="3/3",
        batch="1",
        d="16",
        e="3",
        order="expanded_tokens",
        queries="all",
    ),
    # The gradient of a first state, after whole blocks.
    _row(
        SMALLEST,
        time="edge",
        verb="extend_vjp",
        dtype="float32",
        mask="none",
        heads="4/2",
        batch="2",
        d="16",
        e="72",
        order="window",
    ),
    # A long sequence: the block number has four bits, and one row is left over.
    _row(
        LARGEST,
        time="long",
        verb="forward",
        dtype="float32",
        mask="none",
        heads="1/1",
        batch="1",
        d="16",
        e="16",
        queries="all",
        values="1",
        order="contiguous",
    ),
    # A long cache: a count of tokens in bfloat16 is no longer exact.
    _row(
        LARGEST,
        time="three",
        verb="extend",
        dtype="float64",
        mask="none",
        heads="1/1",
        batch="1",
        d="16",
        e="16",
        order="contiguous",
    ),
    # Caches that end at a block's edge, and a sequence without tokens.
    _row(
        SMALLEST,
        time="more",
        mask="lengths_edge",
        verb="extend",
        dtype="float64",
        heads="3/3",
        batch="3",
        d="16",
        e="3",
        order="every_other_element",
    ),
    # Padding on the left, and wide keys.
    _row(
        SMALLEST,
        time="three",
        mask="key_start",
        verb="vjp",
        dtype="float32",
        d="256",
        e="16",
        queries="fewer",
        heads="4/2",
        batch="1",
    ),
    # Two masks, of which one ends and one begins; wide values.
    _row(
        SMALLEST,
        time="three",
        mask="lengths_edge+segments_long",
        verb="vjp",
        dtype="float32",
        e="256",
        d="16",
        queries="all",
        heads="4/2",
        batch="1",
    ),
    # Keys and gates that are stored once for all sequences, as wide as values; no masks.
    _row(
        SMALLEST,
        time="more",
        verb="vjp",
        dtype="float32",
        mask="none",
        order="expanded_batch",
        heads="4/2",
        batch="3",
        d="16",
        e="16",
        queries="all",
        values="1",
    ),
    # Half precision over several blocks.
    _row(
        SMALLEST,
        time="three",
        verb="vjp",
        dtype="float16",
        mask="lengths_apart",
        heads="4/2",
        batch="2",
        d="16",
        e="16",
        queries="all",
    ),
    # One query.
    _row(
        SMALLEST,
        time="two",
        queries="single",
        mask="key_blocks",
        verb="forward",
        dtype="float32",
        heads="6/1",
        batch="3",
        d="64",
        e="16",
    ),
)


def first_rows(
    levels: Mapping[str, Sequence[str]], paired_options: str, blocks: Sequence[str]
) -> list[Row]:
    """The wanted levels of the first rows, for the mechanism alone and with pairs of options.

    `paired_options` is the expression whose options are combined in pairs; empty for none.
    """
    rows = [_at(blocks, *row) for row in DENSE]
    options = levels.get("option", ())
    if not paired_options:
        return rows + [_of_an_eps(blocks, option) for option in options if option != NONE]
    for number, (one, other) in enumerate(_option_pairs(paired_options, options)):
        verbs = ("vjp", "extend") if f"window={WIDE}" in one else ("vjp",)
        for verb in verbs:
            rows.append(_with_options(blocks, number, verb, one, other))
    return rows


def _at(blocks: Sequence[str], block: int, row: Row) -> Row:
    return {**row, "block": blocks[block if -block <= len(blocks) else 0]}


def _option_pairs(paired_options: str, options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """A window wider than a block with every other option, and each other with the next."""
    others = [option for option in options if option != NONE]
    wide = [option for option in others if f"window={WIDE}" in option]
    for window in wide:
        for other in others:
            if together(paired_options, window, other) is not None:
                yield window, other
    met = set()
    for one, other in pairwise(option for option in others if option not in wide):
        if one not in met and together(paired_options, one, other) is not None:
            met |= {one, other}
            yield one, other
    for option in others:
        if option not in met and option not in wide:
            yield option, NONE


def _with_options(blocks: Sequence[str], number: int, verb: str, one: str, other: str) -> Row:
    """A row with two options: three blocks and a few tokens, with or without a mask."""
    mask = ("lengths_apart", "none", "key_blocks")[number % 3]
    row = {"option": one, "second": other, "time": "three", "verb": verb, "mask": mask}
    more = {"dtype": "float32", "heads": "4/2", "batch": "2", "d": "16", "e": "16"}
    return _at(blocks, SMALLEST, {**row, **more, "queries": "all", "data": "clustered"})


def _of_an_eps(blocks: Sequence[str], option: str) -> Row:
    """A row with another eps of an inner piece, in float64 because it changes few digits."""
    row = {"option": option, "dtype": "float64", "verb": "vjp", "time": "more", "mask": "none"}
    more = {"heads": "4/2", "batch": "1", "d": "5", "e": "3", "queries": "all"}
    return _at(blocks, SMALLEST, {**row, **more, "data": "random"})
