"""The cases of each level, and the parser of case ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from zlib import crc32

import precondattn as pa
from precondattn_conformance import libraries
from precondattn_conformance.case import Case
from precondattn_conformance.checks import CHECK, CHECKS
from precondattn_conformance.conventions import HEAD_ORDER, PROBES, with_equal_heads
from precondattn_conformance.declared import (
    derived,
    expressions,
    is_bounded,
    is_class,
    mechanism_of,
)
from precondattn_conformance.design.levels import LEVELS, NAMED, rows
from precondattn_conformance.design.rows import design
from precondattn_conformance.extremes import EXTREMES
from precondattn_conformance.grid import LAYOUTS, data
from precondattn_conformance.inputs import KINDS, PLAIN, CallLayout
from precondattn_conformance.layout_names import layout_named
from precondattn_conformance.libraries import SHARING
from precondattn_conformance.masks import OF_PAIRS

IsNarrow = Callable[[str, str], bool]
"""Whether an expression is computed in at most float32 with arrays of a library (`widest.py`)."""


def never_narrow(expression: str, library: str) -> bool:
    return False


PARTS = 12
"""The number of cases of options and compositions of which `full` runs one."""
ROWS = 3
"""The number of rows of options and compositions of which `smoke` runs one."""
OF_CLASSES = ("outputs", "gradients", "caching")
"""The checks that each library runs for a class on the plain layout; for others, the first."""
WIDEST = 256
"""The width of keys at which a d × d matrix for each token takes seconds."""
HARMFUL = ("duplicate", "real", *EXTREMES)
"""Kinds of data used only for mechanisms whose result is bounded for any keys."""


def cases(
    level: str = LEVELS[0],
    *,
    only_libraries: tuple[str, ...] = (),
    only_mechanisms: tuple[str, ...] = (),
    only_checks: tuple[str, ...] = (),
    only_dtypes: tuple[str, ...] = (),
    blocks: tuple[int, ...] = (),
    is_narrow: IsNarrow = never_narrow,
    named: str | None = None,
    unpromised: frozenset[str] = frozenset(),
) -> Iterator[Case]:
    """The cases of a level, on every installed library unless `only_libraries` is given.

    `only_mechanisms` may be any expressions, declared or not. All cases of one mechanism are
    consecutive, since they share the oracle's results. `blocks` are those that a backend declares.
    Where it `is_narrow`, cases in float64 become cases in float32. `named`: what the run names, one
    of `levels.NAMED`, on which it depends which part of the cases it has; None: a mechanism if
    there are `only_mechanisms`, and a library if not. `unpromised` are the conventions that the
    backend under test does not promise (`conventions.py`).
    """
    require_possible(
        level,
        (only_checks, CHECKS, "check"),
        (only_libraries, libraries.installed(), "installed array library"),
        (only_dtypes, libraries.WIDE + libraries.HALF, "dtype"),
    )
    mechanisms = tuple(str(pa.parse(text)) for text in only_mechanisms) or tuple(expressions())
    chosen = only_libraries or tuple(libraries.installed())
    if named is None:
        named = "mechanism" if only_mechanisms else "library"
    run = _Run(chosen, only_checks or CHECKS, only_dtypes, blocks, is_narrow, named)
    return _comparable(run.cases(level, mechanisms), unpromised)


def require_possible(level: str, *filters: tuple[Sequence[str], Sequence[str], str]) -> None:
    """Raise a ValueError for another level, or for a name of a filter that is not possible."""
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}; found {level!r}")
    for names, possible, what in filters:
        for name in names:
            if name not in possible:
                raise ValueError(f"{name!r} is no {what}; there are {', '.join(possible)}")


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
    run = _Run(tuple(cls.name for cls in libraries.ALL), blocks=blocks, is_narrow=is_narrow)
    return _comparable(run.cases(LEVELS[-1], filter(is_wanted, expressions())), unpromised)


def _comparable(chosen: Iterator[Case], unpromised: frozenset[str]) -> Iterator[Case]:
    """The cases, each once, with equal heads if the order of grouped ones is not promised."""
    ids: set[str] = set()
    for case in chosen:
        if HEAD_ORDER in unpromised:
            case = with_equal_heads(case)
            if case.id in ids:
                continue
            ids.add(case.id)
        yield case


@dataclass(frozen=True)
class _Run:
    """A run's filters, and what it names.

    A run that names a mechanism has all cases of its level. At `smoke`, so has a run that names
    anything, and the libraries of one that names nothing share the cases. Each library has the
    outputs of every expression, and the gradients and caches of classes as they are declared, on
    one layout. Checks with threads are PyTorch's. Every other case, and every row of the design, is
    on one of the libraries, in turn; of options and compositions it is every third row. JAX has the
    outputs of classes. NumPy, PyTorch and CuPy run the same steps by the same algorithms, so most
    errors show on any of them.

    At `full`, a run that names no mechanism has all cases of classes as they are declared. Of
    options and compositions it has those of `smoke`, and every twelfth other one: the rows of a
    class have every option with every other level, and a composition calls the steps of classes.
    """

    libraries: tuple[str, ...]
    checks: tuple[str, ...] = CHECKS
    dtypes: tuple[str, ...] = ()
    blocks: tuple[int, ...] = ()
    is_narrow: IsNarrow = never_narrow
    named: str = ""

    def cases(self, level: str, mechanisms: Iterable[str]) -> Iterator[Case]:
        ids: set[str] = set()
        """A design row of a class with one option may also be a row of that variant."""
        for mechanism in mechanisms:
            chosen = self._listed(level, mechanism)
            if level == "smoke" and not self.named:
                chosen = filter(self._has, chosen)
            elif level == "full" and self.named not in NAMED[2:] and not is_class(mechanism):
                of_smoke = {case.id for case in self._listed("smoke", mechanism)}
                chosen = (c for c in chosen if c.id in of_smoke or _number(c) % PARTS == 0)
            for case in chosen:
                if case.id not in ids:
                    if case.layout.block:
                        ids.add(case.id)
                    yield case

    def _has(self, case: Case) -> bool:
        """Whether a run of `smoke` that names nothing has this case."""
        is_whole = is_class(case.mechanism)
        if case.library not in SHARING:
            return is_whole or not libraries.named(case.library).compiles_operations
        on_each = OF_CLASSES if is_whole else OF_CLASSES[:1]
        is_one = case.layout == PLAIN or (case.mechanism in derived() and not case.layout.block)
        if case.check == "threads" or (is_one and case.check in on_each):
            return True
        number = _number(case)
        if case.layout.block and not is_whole and number % ROWS:
            return False
        if case.layout.d == WIDEST:
            # The reference may solve or multiply with a d × d matrix for every token.
            leaves = mechanism_of(case.mechanism).program.leaves
            if any(isinstance(leaf, pa.MesaQuery | pa.ConditionedQuery) for leaf in leaves):
                return False
        able = [
            library
            for library in SHARING
            if library in self.libraries
            and case.dtype in libraries.named(library).dtypes
            and CHECK[case.check].applies(replace(case, library=library))
        ]
        return able[number % len(able)] == case.library

    def _listed(self, level: str, mechanism: str) -> Iterator[Case]:
        """The cases of one mechanism, of named layouts and then of rows of the design."""
        filters = (self.libraries, self.checks, self.dtypes, self.is_narrow, self.named)
        yield from of_named_layouts(level, mechanism, *filters)
        for library in self.libraries:
            is_narrow = self.is_narrow(mechanism, library)
            is_one = self.named == "mechanism"
            for case in designed(
                level, mechanism, library, self.blocks, is_narrow=is_narrow, is_one=is_one
            ):
                if case.check in self.checks and case.dtype in (self.dtypes or (case.dtype,)):
                    yield case


def _number(case: Case) -> int:
    """A number by which cases are chosen in turn, the same on every library."""
    key = (case.check, case.dtype, case.layout.name, case.kind, case.mechanism)
    return crc32("-".join(key).encode())


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
    for dtype in only_dtypes or libraries.WIDE + libraries.HALF:
        for library in chosen:
            if dtype not in libraries.named(library).dtypes:
                continue
            run = {"is_alone": len(chosen) == 1, "is_narrow": is_narrow(mechanism, library)}
            for check in checks:
                for layout, kind in data(
                    level, check, library, dtype, mechanism, named=named, **run
                ):
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
    is_one: bool = False,
) -> list[Case]:
    """The cases of the design's rows at a level. Cases of one expression are consecutive.

    `is_one`: the run names the mechanism.
    """
    made = design(mechanism, library, blocks)
    chosen: dict[str, Case] = {}
    for row in rows(level, mechanism, library, blocks, is_one=is_one):
        case = made.case(row)
        if is_narrow and case.dtype == "float64":
            case = replace(case, dtype="float32")
        if makes_sense(case):
            chosen[case.id] = case
    return sorted(chosen.values(), key=lambda case: case.mechanism)


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
    for part, possible, what in (
        (check, checks, "check"),
        (library, tuple(libraries.installed()), "installed array library"),
        (dtype, libraries.WIDE + libraries.HALF, "dtype"),
        (kind, KINDS + EXTREMES, "kind of keys"),
    ):
        if part not in possible:
            raise ValueError(f"{text!r}: {part!r} is no {what}; there are {', '.join(possible)}")
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
