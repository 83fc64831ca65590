"""The test design of a mechanism: its factors, its rows, and the case of each row.

    design("lucid", "torch").rows   →   (check, layout, kind, dtype, expression), …

The factors follow from a mechanism's declaration: without values there is no value width, and
without a state no `extend_vjp`. The rows of a class as it is declared include options, alone and in
pairs, and every triple of `TRIPLES`. Rows of its variants and compositions cover every pair of
levels without options, and another eps of the inner piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

import precondattn as pa
from precondattn.algebra import registry
from precondattn.execution.cache_checks import keeps_tokens
from precondattn_conformance.declared import (
    derived,
    is_bounded,
    is_constant_in_one_token,
    mechanism_of,
)
from precondattn_conformance.design.covering import CoveringArray, GoesTogether, Level, Row
from precondattn_conformance.design.factors import (
    APART,
    BLOCKS,
    CACHES,
    FACTORS,
    FEWER,
    NONE,
    TRIPLES,
    VERBS,
    Apartness,
    IncompatibleLevels,
)
from precondattn_conformance.design.first import first_rows
from precondattn_conformance.design.options import at_block, inner_eps_of, options_of, together
from precondattn_conformance.inputs import CallLayout
from precondattn_conformance.layout_names import named
from precondattn_conformance.libraries import named as library_named
from precondattn_conformance.memory_order import EXPANDED, VIEWS, is_expanded

UNBOUNDED = ("random", "clustered", "zero")
"""Kinds of keys for a preconditioner that is not bounded for all keys."""


class RowCase(NamedTuple):
    """The case of a row, without its library."""

    check: str
    layout: CallLayout
    kind: str
    dtype: str
    expression: str


@dataclass(frozen=True)
class Traits:
    """The properties of a mechanism that determine its factors. Equal traits share their rows."""

    letters: frozenset[str]
    is_causal: bool
    has_states: bool
    has_bias: bool
    is_constant_in_one_token: bool
    is_unbounded: bool
    orders: tuple[str, ...]
    options: tuple[str, ...]
    dtypes: tuple[str, ...]
    blocks: tuple[int, ...]
    paired_options: str
    """The expression whose options are combined in pairs; empty for none."""


class Design:
    """The rows of one mechanism on one library."""

    def __init__(self, expression: str, traits: Traits) -> None:
        self.expression, self.traits = expression, traits

    @cached_property
    def array(self) -> CoveringArray:
        return _array(self.traits)

    @property
    def levels(self) -> dict[str, tuple[str, ...]]:
        """The levels of each factor that the mechanism has."""
        return _levels(self.traits)

    @property
    def rows(self) -> list[Row]:
        """Rows that cover every pair and, for a class as it is declared, every triple of
        `TRIPLES`."""
        return self.array.rows if self.is_whole else self.array.pairs

    @property
    def is_whole(self) -> bool:
        return bool(self.traits.paired_options)

    @property
    def pairs(self) -> frozenset[tuple[Level, Level]]:
        """Every compatible pair of levels."""
        return self.array.pairs_in_rows

    def entry(self, row: Row) -> RowCase:
        return entry(self.expression, row)

    def drawn(self, count: int) -> list[Row]:
        """Rows of compatible levels drawn uniformly at random, the same in every run."""
        rng = np.random.default_rng([22, count])
        levels, goes = _levels(self.traits), _goes_together(self.traits)
        rows: list[Row] = []
        while len(rows) < count:
            row: Row = {}
            for factor in levels:
                allowed = [
                    level
                    for level in levels[factor]
                    if all(goes((factor, level), chosen) for chosen in row.items())
                ]
                if not allowed:
                    break
                row[factor] = allowed[rng.integers(len(allowed))]
            else:
                rows.append(row)
        return rows


@cache
def design(expression: str, library: str, blocks: tuple[int, ...] = ()) -> Design:
    """The design of a mechanism on a library, for these block sizes or `BLOCKS`."""
    m = mechanism_of(expression)
    patterns = list(m.inputs.values())
    letters = frozenset(axis.letter for pattern in patterns for axis in pattern.axes)
    is_declared = str(m) in registry.registered()
    options = options_of(expression) if is_declared else ()
    if expression in derived():
        options = inner_eps_of(expression)
    paired_options = expression if is_declared else ""
    traits = Traits(
        letters=letters,
        is_causal=m.offers.causal,
        has_states=bool(m.program.slots) and not keeps_tokens(m) and m.offers.causal,
        has_bias=any(pattern.is_pairwise for pattern in patterns),
        is_constant_in_one_token=any(
            is_constant_in_one_token(mechanism_of(text)) for text in (expression, *options)
        ),
        is_unbounded=not is_bounded(m),
        orders=_orders(m, library),
        options=options,
        dtypes=library_named(library).dtypes,
        blocks=blocks or BLOCKS,
        paired_options=paired_options,
    )
    return Design(expression, traits)


def _orders(m: pa.Mechanism, library: str) -> tuple[str, ...]:
    expanded = [o for o in EXPANDED if is_expanded(m, o)]
    return ("contiguous", *(() if library == "jax" else VIEWS), *expanded)


@cache
def _array(traits: Traits) -> CoveringArray:
    triples = TRIPLES if traits.paired_options else ()
    levels = _levels(traits)
    first = first_rows(levels, traits.paired_options, levels["block"])
    return CoveringArray(levels, _goes_together(traits), triples, first)


def _levels(traits: Traits) -> dict[str, tuple[str, ...]]:
    """The levels of each factor that the mechanism has."""
    levels = {name: tuple(factor.levels) for name, factor in FACTORS.items()}
    letters = traits.letters
    verbs = {"forward": True, "vjp": True, "extend": traits.is_causal}
    verbs["extend_vjp"] = traits.has_states
    levels["verb"] = tuple(verb for verb in levels["verb"] if verbs[verb])
    levels["block"] = tuple(map(str, traits.blocks))
    levels["order"] = traits.orders
    levels["dtype"] = tuple(d for d in levels["dtype"] if d in traits.dtypes)
    levels["option"] = (NONE, *traits.options) if traits.options else ()
    levels["second"] = levels["option"] if traits.paired_options else ()
    if "n" not in letters:
        levels["heads"] = tuple(h for h in levels["heads"] if h[0] == h[2] or h == "4/2")
    if traits.is_unbounded:
        levels["data"] = UNBOUNDED
    for factor, letter in (("d", "d"), ("e", "e"), ("values", "u")):
        if letter not in letters:
            levels[factor] = ()
    if not {"t", "s"} <= letters:
        levels["queries"] = ()
    if not (traits.has_bias or any("bias=true" in option for option in traits.options)):
        levels["bias"] = ()
    return {factor: chosen for factor, chosen in levels.items() if chosen}


def _goes_together(traits: Traits) -> GoesTogether:
    lines = list(APART)
    masks = FACTORS["mask"].levels
    by_position = tuple(level for level in masks if "lengths" in level or "segment" in level)
    why = "queries of a call that is not causal have no positions"
    if not traits.is_causal:
        lines.append(IncompatibleLevels("queries", FEWER, "mask", by_position, why))
    if traits.is_constant_in_one_token:
        lines.append(IncompatibleLevels("time", ("one",), "verb", ("vjp",), "the gradient is 0"))
    for option in traits.options:
        m = mechanism_of(option)
        if traits.is_causal and not m.offers.causal:
            lines.append(
                IncompatibleLevels("option", (option,), "verb", CACHES, "it is not causal")
            )
            lines.append(
                IncompatibleLevels("second", (option,), "verb", CACHES, "it is not causal")
            )
            lines.append(IncompatibleLevels("option", (option,), "queries", FEWER, why))
            lines.append(IncompatibleLevels("second", (option,), "queries", FEWER, why))
        if not is_bounded(m):
            harmful = tuple(set(FACTORS["data"].levels) - set(UNBOUNDED))
            lines.append(
                IncompatibleLevels("option", (option,), "data", harmful, "it is not bounded")
            )
            lines.append(
                IncompatibleLevels("second", (option,), "data", harmful, "it is not bounded")
            )
    if not traits.has_bias:
        without = tuple(o for o in (NONE, *traits.options) if "bias=true" not in o)
        broadcast = tuple(level for level in FACTORS["bias"].levels if level != "no axis")
        lines.append(IncompatibleLevels("option", without, "bias", broadcast, "there is no bias"))
    apart = Apartness(tuple(lines))

    def goes(one: Level, other: Level) -> bool:
        if {one[0], other[0]} == {"option", "second"}:
            return _options_go(traits.paired_options, *sorted((one, other)))
        return not apart(one, other)

    return goes


def _options_go(paired_options: str, option: Level, second: Level) -> bool:
    if second[1] == NONE:
        return True
    return option[1] != NONE and together(paired_options, option[1], second[1]) is not None


def entry(expression: str, row: Row) -> RowCase:
    """The case of a row."""
    block = int(row["block"])
    s = _tokens(row["time"], block)
    t = {"all": s, "fewer": max(s - block // 2 - 1, 1), "single": 1}[row.get("queries", "all")]
    h, n = map(int, row["heads"].split("/"))
    level_of = {name: FACTORS[name].levels.get(row.get(name, ""), "") for name in FACTORS}
    layout = CallLayout(
        "",
        b=int(row["batch"]),
        t=t,
        s=s,
        h=h,
        n=n,
        d=int(row.get("d", "8")),
        e=int(row.get("e", "6")),
        values_per_head=int(row.get("values", "1")),
        mask=level_of["mask"] or None,
        broadcast=level_of["bias"],
        block=block,
        order=level_of["order"],
    )
    return RowCase(
        VERBS[row["verb"]], named(layout), row["data"], row["dtype"], _with_options(expression, row)
    )


def _tokens(level: str, block: int) -> int:
    return {
        "one": 1,
        "less": block - 1,
        "edge": block,
        "more": block + 1,
        "two": 2 * block + 1,
        "three": 3 * block + 5,
        "long": 1025,
        "longest": 2049,
    }[level]


def _with_options(expression: str, row: Row) -> str:
    option, second = row.get("option", NONE), row.get("second", NONE)
    if option == NONE:
        return expression
    text = option if second == NONE else together(expression, option, second)
    assert text is not None
    return str(pa.parse(at_block(text, int(row["block"]))))
