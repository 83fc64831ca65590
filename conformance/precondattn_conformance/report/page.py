"""One self-contained HTML page of a run. Its form is `page.html.j2`; here is what it shows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from precondattn_conformance.report.cells import SYMBOLS, WORDS, Cell, by, by_family, in_order
from precondattn_conformance.report.record import Record
from precondattn_conformance.report.refusal import in_few_words
from precondattn_conformance.report.result import Result, error_text, share_text
from precondattn_conformance.status import FAILED, PASSED, SKIPPED, STATUSES, UNSUPPORTED, XFAILED

IN_FULL = 150
"""So many failures are shown with everything; of more, the record knows the rest."""

LISTED = 2000
"""So many more by their names."""

KINDS = 12
"""So many kinds of failures are told first: reasons that differ in their numbers only."""

NUMBER = re.compile(r"(?<![\w])-?\d[\d.]*(?:e[+-]?\d+)?")

NEAR = 0.5
"""A cell is marked where its error is a larger share of the bound."""

DTYPES = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}

BREAKS = re.compile(r"(?<=[_,])|(?=[\[(])")
"""Where an expression may go on in the next line."""

LONGEST = 300

DocsLink = Callable[[str], str | None]
"""From the name of a check to the address of its documentation, or None."""


def write_page(
    record: Record, path: Path | str, *, docs_link: DocsLink = lambda check: None
) -> None:
    """Write the page of a record.

    Raises
    ------
    ImportError
        where Jinja2 is not installed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(record, docs_link), encoding="utf-8", errors="replace")


def page(record: Record, docs_link: DocsLink = lambda check: None) -> str:
    """The page as text."""
    try:
        import jinja2
    except ModuleNotFoundError:
        raise ImportError(
            "the page needs Jinja2, which is not installed; install precondattn with its extra "
            "'conformance'"
        ) from None
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"error": error_text, "short": _in_one_line, "parts": BREAKS.split}
    source = files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    failures = Failures([result for result in record.outcomes if result.status == FAILED])
    return environment.from_string(source).render(
        record=record,
        verdict=verdict(record),
        counts=[(s, WORDS[s], SYMBOLS.get(s, "✓"), record.count(s)) for s in STATUSES],
        surroundings=surroundings(record),
        grids=grids(record, failures),
        checks={c: docs_link(c) for c in in_order(r.check for r in record.outcomes)},
        failures=failures,
        expected=[r for r in record.outcomes if r.status == XFAILED],
        refusals=refusals(record),
        skips=by([r for r in record.outcomes if r.status == SKIPPED], lambda r: r.headline),
        covered=covered(record),
        dtypes_short=DTYPES,
    )


def _in_one_line(result: Result, *, share: bool = True) -> str:
    """Why it failed, and by how much."""
    told = result.headline or "no reason was given"
    told = told if len(told) <= LONGEST else f"{told[:LONGEST]}…"
    factor = "" if result.share is None or not share else share_text(result.share)
    return f"{told} ({factor} its bound)" if factor.endswith("×") else told


@dataclass(frozen=True)
class Verdict:
    """What came of the run in one sentence, and whether that is good."""

    is_good: bool
    headline: str
    sentence: str


def verdict(record: Record) -> Verdict:
    """A run is good where something was compared, nothing failed, and it came to its end."""
    who = ", ".join(record.names) or "the default backends"
    compared = sum(result.is_compared for result in record.outcomes)
    failed = record.count(FAILED)
    mechanisms = len({r.mechanism for r in record.outcomes if r.status == FAILED})
    if not record.complete:
        where = f" while it ran {record.running}" if record.running else ""
        sentence = (
            f"{who}: the run stopped{where}. Until then {_many(compared, 'case')} had been "
            f"compared with the oracle, and {failed} had failed."
        )
        return Verdict(False, "Not complete", sentence)
    if failed:
        sentence = (
            f"{who}: {failed} of {_many(compared, 'case')} that were compared with the oracle "
            f"failed, in {_many(mechanisms, 'mechanism')}."
        )
        return Verdict(False, "Failed", sentence)
    if not record.count(PASSED):
        return Verdict(False, "Nothing was compared", f"{who}: no case passed, and none failed.")
    excused = record.count(XFAILED)
    fine = f"{compared - excused} of the" if excused else "All"
    also = f"; {excused} were expected to fail" if excused else ""
    sentence = f"{who}: {fine} {_many(compared, 'compared case')} agree with the oracle{also}."
    return Verdict(True, "Passed", sentence)


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def surroundings(record: Record) -> list[tuple[str, str]]:
    """Where, when and of what the run was, as pairs of a heading and a text."""
    about = record.environment
    named = {name: about.get(name) or {} for name in ("accelerators", "drivers", "settings")}
    revision = about.get("revision")
    pairs = [
        ("Backends", ", ".join(map(_backend, record.backends)) or "those chosen by default"),
        ("Suite", f"precondattn {record.suite}, level {record.level}"),
        ("Only", "; ".join(f"{name} {', '.join(f)}" for name, f in record.filters.items())),
        ("Revision", _revision(revision) if revision else ""),
        ("Date", f"{record.date.replace('T', ' ').partition('+')[0]} UTC"),
        ("Duration", _duration(record.seconds)),
        ("Device", record.device or "default"),
        ("Accelerator", _pairs(named["accelerators"], "{1} ({0})")),
        ("Driver", _pairs(named["drivers"], "{0} {1}")),
        ("Processor", str(about.get("processor", ""))),
        ("System", f"{about.get('platform', '')}, Python {about.get('python', '')}"),
        ("Packages", _pairs(about.get("versions") or {}, "{0} {1}")),
        ("Settings", _pairs(named["settings"], "{0}={1}")),
    ]
    return [(heading, text) for heading, text in pairs if text]


def _pairs(named: dict[str, str], form: str) -> str:
    return ", ".join(form.format(name, value) for name, value in named.items())


def _backend(backend: dict[str, str]) -> str:
    package = f" ({backend['package']} {backend['version']})" if "package" in backend else ""
    return f"{backend['name']}{package}"


def _revision(revision: dict[str, Any]) -> str:
    return f"{revision['commit'][:12]}{', with changes' if revision['modified'] else ''}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"


class Failures:
    """The failing cases: those shown with everything, and the names of the others.

    Where there are too many, every mechanism and check comes first with its first, and so on.
    """

    def __init__(self, results: list[Result]) -> None:
        groups = by(results, lambda result: (result.mechanism, result.check)).values()
        turns = chain.from_iterable(zip_longest(*groups))
        in_turn = [result for result in turns if result is not None]
        shown = {result.id for result in in_turn[:IN_FULL]}
        self.total = len(results)
        self.in_full = [result for result in results if result.id in shown]
        others = [result for result in results if result.id not in shown]
        self.listed, self.left_out = others[:LISTED], max(len(others) - LISTED, 0)
        self.number = {result.id: i for i, result in enumerate(self.in_full)}
        alike = by(results, lambda result: NUMBER.sub("…", _in_one_line(result, share=False)))
        kinds = sorted(alike.items(), key=lambda kind: -len(kind[1]))
        self.kinds = [(text, len(found), self.link(found)) for text, found in kinds[:KINDS]]
        self.more_kinds = len(kinds) - len(self.kinds)

    def link(self, results: list[Result]) -> str:
        """To the first of these that is shown."""
        for result in results:
            if result.id in self.number:
                return f"#failure-{self.number[result.id]}"
        return "#failures" if any(result.status == FAILED for result in results) else ""


@dataclass
class Line:
    """A row of a grid. In a family of several, the first row stands for all."""

    name: str
    cells: list[dict[str, str]]


@dataclass
class Group:
    """A family: a row for all of it, and rows for its mechanisms where there are several."""

    name: str
    head: Line
    members: list[Line] = field(default_factory=list)
    fails: bool = False


@dataclass
class Grid:
    """Mechanisms × checks × dtypes, of one array library or of all."""

    library: str
    columns: dict[str, list[str]]
    """The dtypes of each check."""
    groups: list[Group] = field(default_factory=list)


def grids(record: Record, failures: Failures) -> list[Grid]:
    """One of all libraries together, and one of each."""
    libraries = by(record.outcomes, lambda result: result.library)
    made = [_grid(name, results, failures) for name, results in libraries.items()]
    if len(made) > 1:
        made.insert(0, _grid("all", record.outcomes, failures))
    return made


def _grid(library: str, results: list[Result], failures: Failures) -> Grid:
    order = in_order([*DTYPES, *(result.dtype for result in results)])
    columns = {
        check: sorted({result.dtype for result in found}, key=order.index)
        for check, found in by(results, lambda result: result.check).items()
    }
    grid = Grid(library, columns)

    def line(name: str, of: list[Result], told: str) -> Line:
        found = by(of, lambda result: (result.check, result.dtype))
        cells = [
            _cell(Cell(found.get((check, dtype), ())), f"{told}, {check}, {dtype}", failures)
            for check, dtypes in columns.items()
            for dtype in dtypes
        ]
        return Line(name, cells)

    for name, mechanisms in by_family(results).items():
        together = [result for found in mechanisms.values() for result in found]
        fails = any(result.status == FAILED for result in together)
        if len(mechanisms) == 1:
            (only,) = mechanisms
            grid.groups.append(Group(only, line(only, together, only), fails=fails))
            continue
        members = [line(each, found, each) for each, found in mechanisms.items()]
        told = f"{name}, {len(mechanisms)} mechanisms"
        grid.groups.append(Group(name, line(name, together, told), members, fails))
    return grid


def _cell(cell: Cell, told: str, failures: Failures) -> dict[str, str]:
    """The text of a cell, what is told of it, its class, and where it leads."""
    if not cell.results:
        return {"status": "", "text": "", "told": "", "link": ""}
    worst = cell.worst
    near = cell.status == PASSED and worst is not None and (worst.share or 0.0) > NEAR
    return {
        "status": "near" if near else cell.status,
        "text": cell.brief,
        "told": f"{told}: {cell.in_words}",
        "link": failures.link(cell.results) if cell.status == FAILED else "",
    }


@dataclass
class Refusal:
    """A reason of the backend, and what it was given for."""

    reason: str
    total: int
    mechanisms: dict[str, int]
    checks: list[str]
    places: list[str]
    example: str
    """In full, where it says more."""


def refusals(record: Record) -> list[Refusal]:
    """What is unsupported, by reason, the most frequent first."""
    refused = [result for result in record.outcomes if result.status == UNSUPPORTED]
    groups = by(refused, lambda result: in_few_words(result.reason, record.names))
    found = [
        Refusal(
            reason,
            len(results),
            dict(Counter(result.mechanism for result in results)),
            in_order(result.check for result in results),
            in_order(f"{result.library} {result.dtype}" for result in results),
            results[0].reason if results[0].reason.strip() != reason else "",
        )
        for reason, results in groups.items()
    ]
    return sorted(found, key=lambda refusal: -refusal.total)


@dataclass
class Covered:
    """How much was compared: by check, by library and dtype, by mechanism and check."""

    checks: list[tuple[str, Counter[str]]]
    places: list[tuple[str, Counter[str]]]
    nothing: list[str]
    """Mechanisms of which nothing was compared."""
    columns: list[str]
    rows: dict[str, list[str]]
    """By mechanism: compared / all, for each check."""


def covered(record: Record) -> Covered:
    """The coverage of a record, as the page shows it."""
    results = record.outcomes

    def counts(key: Callable[[Result], str]) -> list[tuple[str, Counter[str]]]:
        return [
            (name, Counter("compared" if r.is_compared else r.status for r in found))
            for name, found in by(results, key).items()
        ]

    columns = in_order(result.check for result in results)
    rows: dict[str, list[str]] = {}
    compared: Counter[str] = Counter()
    for row in record.coverage:
        cells = rows.setdefault(row.mechanism, [""] * len(columns))
        cells[columns.index(row.check)] = f"{row.compared}/{row.total}"
        compared[row.mechanism] += row.compared
    return Covered(
        counts(lambda result: result.check),
        counts(lambda result: f"{result.library} {result.dtype}"),
        [mechanism for mechanism in rows if not compared[mechanism]],
        columns,
        rows,
    )
