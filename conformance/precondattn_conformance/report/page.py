"""The contents of a run's self-contained HTML page. The template is `page.html.j2`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from precondattn.json_types import JsonObject
from precondattn_conformance.report.cells import SYMBOLS, WORDS, grouped_by, in_order
from precondattn_conformance.report.failures import Failures, in_one_line
from precondattn_conformance.report.grids import DTYPES, grids
from precondattn_conformance.report.record import RunRecord
from precondattn_conformance.report.refusal import in_few_words
from precondattn_conformance.report.result import Result, error_text
from precondattn_conformance.status import FAILED, PASSED, SKIPPED, STATUSES, UNSUPPORTED, XFAILED

BREAKS = re.compile(r"(?<=[_,])|(?=[\[(])")
"""Places at which a line may break within an expression."""


def write_page(record: RunRecord, path: Path | str) -> None:
    """Write the page of a record.

    Raises
    ------
    ImportError
        if Jinja2 is not installed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(record), encoding="utf-8", errors="replace")


def page(record: RunRecord) -> str:
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
    environment.filters |= {"error": error_text, "short": in_one_line, "parts": BREAKS.split}
    source = files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    failures = Failures([result for result in record.outcomes if result.status == FAILED])
    return environment.from_string(source).render(
        record=record,
        verdict=verdict(record),
        counts=[(s, WORDS[s], SYMBOLS.get(s, "✓"), record.count(s)) for s in STATUSES],
        environment=environment_of(record),
        grids=grids(record, failures),
        failures=failures,
        expected=[r for r in record.outcomes if r.status == XFAILED],
        refusals=refusals(record),
        skips=grouped_by([r for r in record.outcomes if r.status == SKIPPED], lambda r: r.headline),
        covered=covered(record),
        dtypes_short=DTYPES,
    )


@dataclass(frozen=True)
class RunVerdict:
    """The result of the run in one sentence, and whether it is good."""

    is_good: bool
    headline: str
    sentence: str


def verdict(record: RunRecord) -> RunVerdict:
    """The verdict: good if enough was compared, nothing failed, and the run was completed."""
    names = ", ".join(record.names) or "the default backends"
    compared = sum(result.is_compared for result in record.outcomes)
    failed = record.count(FAILED)
    mechanisms = len({r.mechanism for r in record.outcomes if r.status == FAILED})
    if not record.complete:
        where = f" while it ran {record.running}" if record.running else ""
        sentence = (
            f"{names}: the run stopped{where}. Until then {_many(compared, 'case')} had been "
            f"compared with the oracle, and {failed} had failed."
        )
        return RunVerdict(False, "Not complete", sentence)
    if failed:
        sentence = (
            f"{names}: {failed} of {_many(compared, 'case')} that were compared with the oracle "
            f"failed, in {_many(mechanisms, 'mechanism')}."
        )
        return RunVerdict(False, "Failed", sentence)
    if not record.count(PASSED):
        return RunVerdict(
            False, "Nothing was compared", f"{names}: no case passed, and none failed."
        )
    few = [row for row in record.checks if not row["is_enough"]]
    if few:
        counts = ", ".join(f"{row['check']} {row['compared']} of {row['of']}" for row in few)
        return RunVerdict(
            False,
            "Too little was compared",
            f"{names}: fewer than half of a check's cases, not counting declared ones: {counts}.",
        )
    excused = record.count(XFAILED)
    agreeing = f"{compared - excused} of the" if excused else "All"
    expected = f"; {excused} were expected to fail" if excused else ""
    sentence = (
        f"{names}: {agreeing} {_many(compared, 'compared case')} agree with the oracle{expected}."
    )
    return RunVerdict(True, "Passed", sentence)


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def environment_of(record: RunRecord) -> list[tuple[str, str]]:
    """The environment of the run, as pairs of a heading and a text."""
    environment = record.environment
    named = {name: environment.get(name) or {} for name in ("accelerators", "drivers", "settings")}
    revision = environment.get("revision")
    pairs = [
        ("Backends", ", ".join(map(_backend, record.backends)) or "those chosen by default"),
        ("Suite", f"precondattn {record.suite}, level {record.level}"),
        ("Outputs only", _outputs_only(record)),
        ("Only", "; ".join(f"{name} {', '.join(f)}" for name, f in record.filters.items())),
        ("Revision", _revision(revision) if revision else ""),
        ("Date", f"{record.date.replace('T', ' ').partition('+')[0]} UTC"),
        ("Duration", _duration(record.seconds)),
        ("Device", record.device or "default"),
        ("Accelerator", _pairs(named["accelerators"], "{1} ({0})")),
        ("Driver", _pairs(named["drivers"], "{0} {1}")),
        ("Processor", str(environment.get("processor", ""))),
        ("System", f"{environment.get('platform', '')}, Python {environment.get('python', '')}"),
        ("Packages", _pairs(environment.get("versions") or {}, "{0} {1}")),
        ("Settings", _pairs(named["settings"], "{0}={1}")),
    ]
    return [(heading, text) for heading, text in pairs if text]


def _outputs_only(record: RunRecord) -> str:
    """A text on how many cases were compared without gradients, and why."""
    reasons = Counter(in_few_words(r.outputs_only) for r in record.outcomes if r.outputs_only)
    return "; ".join(f"{_many(n, 'case')}: {why}" for why, n in reasons.most_common())


def _pairs(named: dict[str, str], form: str) -> str:
    return ", ".join(form.format(name, value) for name, value in named.items())


def _backend(backend: dict[str, str]) -> str:
    package = f" ({backend['package']} {backend['version']})" if "package" in backend else ""
    return f"{backend['name']}{package}"


def _revision(revision: JsonObject) -> str:
    return f"{revision['commit'][:12]}{', with changes' if revision['modified'] else ''}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"


@dataclass
class Refusal:
    """A reason of the backend, and the cases that it declined for this reason."""

    reason: str
    total: int
    mechanisms: dict[str, int]
    checks: list[str]
    places: list[str]
    example: str
    """The full reason of one case, if the shown reason is cut."""


def refusals(record: RunRecord) -> list[Refusal]:
    """The unsupported cases by reason, the most frequent first."""
    refused = [result for result in record.outcomes if result.status == UNSUPPORTED]
    groups = grouped_by(refused, lambda result: in_few_words(result.reason, record.names))
    reasons = [
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
    return sorted(reasons, key=lambda refusal: -refusal.total)


@dataclass
class Covered:
    """Numbers of compared cases: by check, by library and dtype, by mechanism and check."""

    checks: list[tuple[str, Counter[str]]]
    places: list[tuple[str, Counter[str]]]
    nothing: list[str]
    """Mechanisms of which nothing was compared."""
    columns: list[str]
    rows: dict[str, list[str]]
    """"compared / all" for each check, by mechanism."""


def covered(record: RunRecord) -> Covered:
    """The coverage of a record for the page."""
    results = record.outcomes

    def counts(key: Callable[[Result], str]) -> list[tuple[str, Counter[str]]]:
        return [
            (name, Counter("compared" if r.is_compared else r.status for r in group))
            for name, group in grouped_by(results, key).items()
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
