"""The test design of a mechanism: its factors, its rows, and the case of each row.

    design("lucid", "torch").rows   →   {"verb": "vjp", "time": "three", …}, …

The factors follow from a mechanism's declaration: without values there is no value width, and
without a state no `extend_vjp`. The rows of a class as it is declared include options, alone and in
pairs, and every triple of `TRIPLES`. Rows of its variants and compositions cover every pair of
levels without options, and another eps of the inner piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import precondattn as pa
from precondattn.execution.cache_checks import keeps_tokens
from precondattn_conformance import declared, libraries
from precondattn_conformance.case import Case
from precondattn_conformance.design.covering import CoveringArray, Level, Row
from precondattn_conformance.design.dense import first_rows
from precondattn_conformance.design.factors import (
    APART,
    BLOCKS,
    BROADCAST,
    CACHES,
    FACTORS,
    FEWER,
    NONE,
    TOKENS,
    TRIPLES,
    VERBS,
    Apart,
)
from precondattn_conformance.design.options import at_block, inner_eps_of, options_of, together
from precondattn_conformance.inputs import CallLayout
from precondattn_conformance.layout_names import named
from precondattn_conformance.memory_order import EXPANDED, VIEWS, is_expanded

Levels = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Design:
    """The rows of one mechanism on one library."""

    expression: str
    library: str
    array: CoveringArray
    is_whole: bool
    """Whether the mechanism is a class as it is declared, whose options are combined in pairs."""

    def case(self, row: Row) -> Case:
        """The case of a row."""
        block = int(row["block"])
        blocks, more = TOKENS[row["time"]]
        s = blocks * block + more
        t = {"all": s, "fewer": max(s - block // 2 - 1, 1), "single": 1}[row.get("queries", "all")]
        h, n = map(int, row["heads"].split("/"))
        d, e, values = (int(row.get(x, y)) for x, y in (("d", "8"), ("e", "6"), ("values", "1")))
        layout = CallLayout("", int(row["batch"]), t, s, h, n, d, e, values_per_head=values)
        mask = None if row["mask"] == "none" else row["mask"]
        order = "" if row["order"] == "contiguous" else row["order"]
        broadcast = BROADCAST[row.get("bias", "no axis")]
        layout = layout._replace(mask=mask, broadcast=broadcast, block=block, order=order)
        option, second = row.get("option", NONE), row.get("second", NONE)
        text = self.expression
        if option != NONE:
            both = option if second == NONE else together(self.expression, option, second)
            assert both is not None
            text = str(pa.parse(at_block(both, block)))
        check, library = VERBS[row["verb"]], self.library
        return Case(check, text, library, row["dtype"], named(layout), row["data"])


@cache
def design(expression: str, library: str, blocks: tuple[int, ...] = ()) -> Design:
    """The design of a mechanism on a library, for these block sizes or `BLOCKS`."""
    m = declared.mechanism_of(expression)
    is_whole = declared.is_class(str(m))
    options = options_of(expression) if is_whole else ()
    if expression in declared.derived():
        options = inner_eps_of(expression)
    levels = _levels(m, options, libraries.named(library), blocks or BLOCKS)
    levels["second"] = levels["option"] if is_whole else ()
    items = tuple((factor, of_factor) for factor, of_factor in levels.items() if of_factor)
    array = _array(items, tuple(_apart(m, options)), expression if is_whole else "")
    return Design(expression, library, array, is_whole)


@cache
def _array(
    levels: tuple[tuple[str, tuple[str, ...]], ...],
    apart: tuple[Apart, ...],
    paired_options: str,
) -> CoveringArray:
    """The rows, which designs with equal levels share.

    `paired_options` is the expression whose options are combined in pairs; empty for none.
    """
    pairs = {
        ((line.factor, level), (line.other, other))
        for line in apart
        for level in line.levels
        for other in line.others
    }

    def goes(one: Level, other: Level) -> bool:
        if one[0] != "option" or other[0] != "second":
            return (one, other) not in pairs and (other, one) not in pairs
        if NONE in (one[1], other[1]):
            return other[1] == NONE
        return together(paired_options, one[1], other[1]) is not None

    of_factor = dict(levels)
    triples = TRIPLES if paired_options else ()
    wanted = first_rows(of_factor.get("option", ()), paired_options, of_factor["block"])
    return CoveringArray(of_factor, goes, triples, [*wanted])


def _levels(
    m: pa.Mechanism,
    options: tuple[str, ...],
    library: libraries.Library,
    blocks: tuple[int, ...],
) -> Levels:
    """The levels of each factor; none if the mechanism lacks it."""
    levels = dict(FACTORS)
    letters = {axis.letter for pattern in m.inputs.values() for axis in pattern.axes}
    has_states = m.offers.causal and bool(m.program.slots) and not keeps_tokens(m)
    lacks = {"extend": not m.offers.causal, "extend_vjp": not has_states}
    levels["verb"] = tuple(verb for verb in VERBS if not lacks.get(verb))
    levels["block"] = tuple(map(str, blocks))
    views = () if library.name == "jax" else VIEWS
    levels["order"] = ("contiguous", *views, *(o for o in EXPANDED if is_expanded(m, o)))
    levels["dtype"] = tuple(d for d in levels["dtype"] if d in library.dtypes)
    levels["option"] = (NONE, *options) if options else ()
    if "n" not in letters:
        levels["heads"] = tuple(h for h in levels["heads"] if h[0] == h[2] or h == "4/2")
    if not declared.is_bounded(m):
        levels["data"] = ("random", "clustered", "zero")
    needs = {"d": "d", "e": "e", "values": "u", "queries": "ts"}
    absent = [factor for factor, needed in needs.items() if not letters.issuperset(needed)]
    if not (_has_bias(m) or any("bias=true" in option for option in options)):
        absent.append("bias")
    return levels | dict.fromkeys(absent, ())


def _has_bias(m: pa.Mechanism) -> bool:
    return any(pattern.is_pairwise for pattern in m.inputs.values())


def _apart(m: pa.Mechanism, options: tuple[str, ...]) -> list[Apart]:
    """The incompatible levels of a mechanism with these options."""
    lines = list(APART)
    by_position = tuple(mask for mask in FACTORS["mask"] if "lengths" in mask or "segment" in mask)
    if not m.offers.causal:  # Its queries have no positions.
        lines.append(Apart("queries", FEWER, "mask", by_position))
    changed = {option: declared.mechanism_of(option) for option in options}
    if any(map(declared.is_constant_in_one_token, (m, *changed.values()))):
        lines.append(Apart("time", ("one",), "verb", ("vjp",)))  # The gradient is 0.
    for option, other in changed.items():
        for factor in ("option", "second"):
            if m.offers.causal and not other.offers.causal:
                lines.append(Apart(factor, (option,), "verb", CACHES))
                lines.append(Apart(factor, (option,), "queries", FEWER))
            if not declared.is_bounded(other):
                lines.append(Apart(factor, (option,), "data", ("duplicate",)))
    if not _has_bias(m):
        without = tuple(o for o in (NONE, *options) if "bias=true" not in o)
        axes = ("over b", "over h", "over b and h")
        lines.append(Apart("option", without, "bias", axes))
    return lines
