"""The cases of each level, and the parser of case ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import precondattn as pa
from precondattn_conformance import libraries
from precondattn_conformance.case import Case
from precondattn_conformance.checks import CHECK, CHECKS
from precondattn_conformance.conventions import HEAD_ORDER, PROBES, with_equal_heads
from precondattn_conformance.declared import expressions, is_bounded, mechanism_of
from precondattn_conformance.design.chosen import rows
from precondattn_conformance.design.rows import design
from precondattn_conformance.extremes import EXTREMES
from precondattn_conformance.grid import LAYOUTS, LEVELS, data
from precondattn_conformance.inputs import KINDS, CallLayout
from precondattn_conformance.layout_names import layout_named
from precondattn_conformance.masks import OF_PAIRS
from precondattn_conformance.sharing import Sharing

IsNarrow = Callable[[str, str], bool]
"""Whether an expression is computed in at most float32 with arrays of a library (`widest.py`)."""


def never_narrow(expression: str, library: str) -> bool:
    return False


HARMFUL = ("duplicate", "real", *EXTREMES)
"""Kinds of data used only for mechanisms whose result is bounded for any keys."""


def cases(
    level: str = "smoke",
    *,
    only_libraries: tuple[str, ...] = (),
    only_mechanisms: tuple[str, ...] = (),
    only_checks: tuple[str, ...] = (),
    only_dtypes: tuple[str, ...] = (),
    blocks: tuple[int, ...] = (),
    is_narrow: IsNarrow = never_narrow,
    is_shared: bool = False,
    unpromised: frozenset[str] = frozenset(),
) -> Iterator[Case]:
    """The cases of a level, on every installed library unless `only_libraries` is given.

    `only_mechanisms` may be any expressions, declared or not. All cases of one mechanism are
    consecutive, since they share the oracle's results. `blocks` are those that a backend declares.
    Where it `is_narrow`, cases in float64 become cases in float32. If `is_shared`, the libraries
    share the cases of `smoke` (`sharing.py`). `unpromised` are the conventions that the backend
    under test does not promise (`conventions.py`).
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}; found {level!r}")
    for names, known, what in (
        (only_checks, CHECKS, "check"),
        (only_libraries, tuple(libraries.installed()), "installed array library"),
        (only_dtypes, libraries.WIDE + libraries.HALF, "dtype"),
    ):
        for name in names:
            if name not in known:
                raise ValueError(f"{name!r} is no {what}; there are {', '.join(known)}")
    mechanisms = tuple(str(pa.parse(text)) for text in only_mechanisms) or tuple(expressions())
    chosen = only_libraries or tuple(libraries.installed())
    checks = only_checks or CHECKS
    sharing = None
    if is_shared and level == LEVELS[0]:
        sharing = Sharing({name: libraries.named(name).dtypes for name in chosen})
    named = "" if is_shared else "mechanism" if only_mechanisms else "library"
    found = _cases(
        level, mechanisms, chosen, checks, only_dtypes, blocks, is_narrow, sharing, named
    )
    return _comparable(found, unpromised)


def known_cases(
    blocks: tuple[int, ...] = (),
    is_wanted: Callable[[str], bool] = lambda expression: True,
    is_narrow: IsNarrow = never_narrow,
    unpromised: frozenset[str] = frozenset(),
) -> Iterator[Case]:
    """Every case of every library, installed or not. The last level contains those of all others.

    It yields only cases of wanted expressions, and of expressions that differ from these in
    options.
    """
    every_library = tuple(cls.name for cls in libraries.ALL)
    wanted = tuple(filter(is_wanted, expressions()))
    found = _cases(LEVELS[-1], wanted, every_library, CHECKS, (), blocks, is_narrow)
    return _comparable(found, unpromised)


def _comparable(found: Iterator[Case], unpromised: frozenset[str]) -> Iterator[Case]:
    """The cases, each once, with equal heads if the order of grouped ones is not promised."""
    ids: set[str] = set()
    for case in found:
        if HEAD_ORDER in unpromised:
            case = with_equal_heads(case)
            if case.id in ids:
                continue
            ids.add(case.id)
        yield case


def _cases(
    level: str,
    mechanisms: tuple[str, ...],
    chosen: tuple[str, ...],
    checks: tuple[str, ...],
    only_dtypes: tuple[str, ...],
    blocks: tuple[int, ...],
    is_narrow: IsNarrow,
    sharing: Sharing | None = None,
    named: str = "",
) -> Iterator[Case]:
    ids: set[str] = set()
    """A design row of a class with one option may also be a row of that variant."""
    for mechanism in mechanisms:
        for case in of_named_layouts(
            level, mechanism, chosen, checks, only_dtypes, is_narrow, named
        ):
            if sharing is None or sharing.has_case(case):
                yield case
        for library in chosen:
            narrow = is_narrow(mechanism, library)
            made = designed(
                level,
                mechanism,
                library,
                blocks,
                is_narrow=narrow,
                sharing=sharing,
                is_one=named == "mechanism",
            )
            for case in made:
                is_wanted = not only_dtypes or case.dtype in only_dtypes
                if is_wanted and case.check in checks and case.id not in ids:
                    ids.add(case.id)
                    yield case


def of_named_layouts(
    level: str,
    mechanism: str,
    chosen: tuple[str, ...],
    checks: tuple[str, ...] = CHECKS,
    only_dtypes: tuple[str, ...] = (),
    is_narrow: IsNarrow = never_narrow,
    named: str = "",
) -> Iterator[Case]:
    """The cases of one mechanism at a level, on these libraries, without the rows of the design.

    `named` says what the run names, as in `data`.
    """
    is_alone = len(chosen) == 1
    for dtype in libraries.WIDE + libraries.HALF:
        if only_dtypes and dtype not in only_dtypes:
            continue
        for library in chosen:
            if dtype not in libraries.named(library).dtypes:
                continue
            narrow = is_narrow(mechanism, library)
            chosen_data = partial(data, is_alone=is_alone, is_narrow=narrow, named=named)
            for check in checks:
                for layout, kind in chosen_data(level, check, library, dtype, mechanism):
                    case = Case(check, mechanism, library, dtype, layout, kind)
                    if makes_sense(case):
                        yield case


def designed(
    level: str,
    mechanism: str,
    library: str,
    blocks: tuple[int, ...] = (),
    *,
    is_narrow: bool = False,
    sharing: Sharing | None = None,
    is_one: bool = False,
) -> list[Case]:
    """The cases of the design's rows at a level. Cases of one expression are consecutive.

    `is_one`: the run names the mechanism.
    """
    made = design(mechanism, library, blocks)
    found: dict[str, Case] = {}
    for number, row in enumerate(rows(level, mechanism, library, blocks, is_one=is_one)):
        if sharing is not None and not sharing.has_row(number, row, mechanism, library):
            continue
        check, layout, kind, dtype, expression = made.entry(row)
        if is_narrow and dtype == "float64":
            dtype = "float32"
        case = Case(check, expression, library, dtype, layout, kind)
        if makes_sense(case):
            found[case.id] = case
    return sorted(found.values(), key=lambda case: case.mechanism)


def case_of(text: str, checks: tuple[str, ...] = tuple(CHECK)) -> Case:
    """The case with an id, whose check is one of these.

    Raises
    ------
    ValueError
        if the text is no id; the message names the part that is wrong.
    """
    parts = text.strip().split("-", 5)
    if len(parts) != 6:
        raise ValueError(f"{text!r} is no case; an id is check-library-dtype-layout-keys-mechanism")
    check, library, dtype, layout, kind, mechanism = parts
    for part, known, what in (
        (check, checks, "check"),
        (library, tuple(libraries.installed()), "installed array library"),
        (dtype, libraries.WIDE + libraries.HALF, "dtype"),
        (kind, KINDS + EXTREMES, "kind of keys"),
    ):
        if part not in known:
            raise ValueError(f"{text!r}: {part!r} is no {what}; there are {', '.join(known)}")
    sizes = LAYOUTS.get(layout) or PROBES.get(layout) or layout_named(layout)
    if sizes is None:
        raise ValueError(f"{text!r}: {layout!r} is no layout; there are {', '.join(LAYOUTS)}")
    return Case(check, str(pa.parse(mechanism)), library, dtype, sizes, kind)


def makes_sense(case: Case) -> bool:
    """Whether the mechanism has a well-defined result for this data, and the check applies."""
    return _makes_sense(case.check, case.mechanism, case.library, case.layout, case.kind)


@cache
def _makes_sense(check: str, expression: str, library: str, layout: CallLayout, kind: str) -> bool:
    """The dtype-independent part of `makes_sense`."""
    if not has_result(expression, layout, kind):
        return False
    return CHECK[check].applies(Case(check, expression, library, "float64", layout, kind))


@cache
def has_result(expression: str, layout: CallLayout, kind: str) -> bool:
    """Whether a mechanism has a well-defined result for this data."""
    if kind in HARMFUL and not is_bounded(mechanism_of(expression)):
        return False
    if _is_refused(expression, layout):
        return False
    if layout.mask is not None and layout.t != layout.s:
        if not _has_keys(expression):
            return False  # The mechanism's mask applies to queries.
        is_causal = mechanism_of(expression).offers.causal
        if layout.has("attn_mask"):
            return False  # The layout's mask has a row for every key.
        if (layout.has("lengths") or layout.has("segment_ids")) and not is_causal:
            return False  # The positions of its queries are not defined.
    return True


def _is_refused(expression: str, layout: CallLayout) -> bool:
    """Whether a leaf refuses calls of this size or with these masks."""
    names = ("lengths", "key_mask", "segment_ids")
    masks = frozenset(name for name in names if layout.has(name))
    leaves = mechanism_of(expression).program.leaves
    try:
        for leaf in leaves:
            leaf.check_call({"t": layout.t, "s": layout.s}, masks)
    except ValueError:
        return True
    of_pairs = [name for name in OF_PAIRS if layout.has(name)]
    if of_pairs and not any(leaf.relates_tokens for leaf in leaves):
        return True
    return any(leaf.refuses_mask(name) for name in of_pairs for leaf in leaves)


def _has_keys(expression: str) -> bool:
    patterns = mechanism_of(expression).inputs.values()
    return any(axis.letter == "s" for pattern in patterns for axis in pattern.axes)
