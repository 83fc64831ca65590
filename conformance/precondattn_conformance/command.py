"""`precondattn conformance`: progress, a matrix of outcomes, the failures, and an exit code."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from precondattn_conformance import libraries
from precondattn_conformance.case import Case
from precondattn_conformance.checks.plain import WRONG_TOO
from precondattn_conformance.enough import CheckShare, below_floor, print_shares, too_little
from precondattn_conformance.expectations import Expectations
from precondattn_conformance.functions.backend import FunctionBackend
from precondattn_conformance.functions.diagnosis import diagnosis
from precondattn_conformance.progress import Progress
from precondattn_conformance.promises import BROKEN, UNKNOWN, Promise
from precondattn_conformance.report.junit import write_junit
from precondattn_conformance.report.matrix import matrix
from precondattn_conformance.report.page import write_page
from precondattn_conformance.report.record import RecordWriter
from precondattn_conformance.report.refusal import in_few_words
from precondattn_conformance.runner import Outcome, Report
from precondattn_conformance.session import Session
from precondattn_conformance.status import COMPARED, FAILED, PASSED, SKIPPED, UNSUPPORTED, XFAILED
from precondattn_conformance.writable import require_writable

SHOWN_FAILURES = 10
SHOWN_DETAILS = 3
"""The number of checks whose first failure is printed with an error map and a snippet."""


def conformance(
    session: Session,
    console: Console,
    *,
    record: Path | None = None,
    html: Path | None = None,
    junit: Path | None = None,
) -> int:
    """Run the suite and print the outcomes; returns exit code 0, or 1 for a failure.

    A run in which nothing was compared is a failure: a backend that declines everything is not
    shown to be correct. After Ctrl-C the outcomes so far are printed, and the exit code is 130.
    """
    require_writable(record, html, junit)
    todo = session.cases()
    expectations = session.expectations(todo)
    if session.device is not None:
        libraries.require_device((case.library for case in todo), session.device)
    recording = RecordWriter(
        record,
        backends=session.backend,
        level=session.level,
        device=session.device,
        filters=session.filters,
    )
    report, is_interrupted = Report(), False
    promised: list[Promise] = []
    compared: list[CheckShare] = []
    try:
        with recording:
            try:
                _run(session, todo, expectations, recording, report, console)
            finally:
                recording.put_in_order(case.id for case in todo)
            promised = session.promises(report.outcomes)
            compared = session.shares(report.outcomes)
            recording.summarize(promised, compared)
    except KeyboardInterrupt:
        is_interrupted = True
    report.put_in_order(todo)
    _print_failures(report, console)
    matrix(report.outcomes, console)
    _print_refusals(report, console)
    print_shares(compared, console)
    below = [] if is_interrupted else below_floor(session.under_test, todo, report.outcomes)
    _print_promises(promised, console)
    below += too_little(compared)
    _print_outputs_only(report, console)
    _print_verdict(report, below, session, len(todo), console)
    if not is_interrupted and report.count(FAILED):
        _print_diagnosis(session, console)
    if junit is not None:
        write_junit(recording.record, junit)
    if html is not None:
        write_page(recording.record, html)
    if is_interrupted:
        return 130
    return 0 if report.is_good and not below else 1


def _plainly(console: Console, *texts: str) -> None:
    """Print texts as they are."""
    for text in texts:
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _run(
    session: Session,
    todo: list[Case],
    expectations: Expectations,
    recording: RecordWriter,
    report: Report,
    console: Console,
) -> None:
    outcomes = session.run(todo, expectations, recording.started)
    with Progress(console, len(todo)) as progress, closing(outcomes):  # Closing ends the processes.
        for outcome in outcomes:
            report.outcomes.append(outcome)
            recording.add(outcome)
            progress.advance(is_failed=outcome.status == FAILED)
            if outcome.status == FAILED and progress.failed <= SHOWN_FAILURES:
                progress.print(f"[red]failed[/red] {escape(outcome.case.id)}")


def _print_failures(report: Report, console: Console) -> None:
    failures = [outcome for outcome in report.outcomes if outcome.status == FAILED]
    shown = sorted(failures, key=_difficulty)[:SHOWN_FAILURES]
    first = {outcome.case.check: outcome for outcome in reversed(shown)}
    in_full = [outcome for outcome in shown if first[outcome.case.check] is outcome]
    for outcome in shown:
        console.print(f"\n[red]failed[/red] {escape(outcome.case.id)}", soft_wrap=True)
        text = outcome.text if outcome in in_full[:SHOWN_DETAILS] else outcome.reason
        _plainly(console, _indented(text))
    if len(failures) > SHOWN_FAILURES:
        console.print(f"... and {len(failures) - SHOWN_FAILURES} more", markup=False)
    if failures:
        console.print()


def _print_refusals(report: Report, console: Console) -> None:
    refusals = {in_few_words(o.reason) for o in report.outcomes if o.status == UNSUPPORTED}
    for reason in itertools.islice(sorted(refusals), SHOWN_FAILURES):
        console.print(f"[yellow]unsupported[/yellow] {escape(reason)}", soft_wrap=True)


def _print_promises(promised: list[Promise], console: Console) -> None:
    """Print which conventions hold, among those not promised and those that a case needed."""
    told = [each for each in promised if each.verdict != UNKNOWN]
    if told:
        _plainly(console, "; ".join(map(str, told)))
    broken = (each.why for each in told if each.verdict == BROKEN)
    _plainly(
        console, *(f"{why}; if that is intended, leave it out of `promises`" for why in broken)
    )


def _difficulty(outcome: Outcome) -> tuple[bool, int, int]:
    """Sort key: causes before consequences, then short sequences, then simple mechanisms."""
    case = outcome.case
    return WRONG_TOO in outcome.reason, case.layout.t, len(case.mechanism)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def _print_outputs_only(report: Report, console: Console) -> None:
    """Print how many cases were compared without gradients, and why."""
    reasons = (o.measured.outputs_only for o in report.outcomes if o.measured is not None)
    for reason, count in Counter(in_few_words(r) for r in reasons if r).most_common():
        text = f"compared without gradients: {count} cases, since the backend {reason}"
        _plainly(console, text)


def _print_verdict(
    report: Report, below: list[str], session: Session, requested: int, console: Console
) -> None:
    statuses = (PASSED, FAILED, UNSUPPORTED, XFAILED, SKIPPED)
    counts = [(status, report.count(status)) for status in statuses]
    shown = [f"{n} {s}" for s, n in counts if n or s in (PASSED, FAILED, UNSUPPORTED)]
    names = ", ".join(session.backend) or "the backends chosen by default"
    console.print(f"{names}: {', '.join(shown)}", markup=False, highlight=False)
    for line in below:
        console.print(escape(line), style="red", highlight=False, soft_wrap=True)
    if len(report.outcomes) < requested:
        missing = requested - len(report.outcomes)
        console.print(f"[red]interrupted[/red]: {missing} of {requested} cases were not run")
    elif not any(report.count(status) for status in COMPARED):
        console.print("[red]nothing was compared, which counts as a failure[/red]")
    elif report.is_good and not below:
        _print_next(session, console)


def _print_diagnosis(session: Session, console: Console) -> None:
    """Print what a function computes instead, if its plain call is wrong."""
    backend = session.source.backend if session.source is not None else None
    if isinstance(backend, FunctionBackend):
        _plainly(console, *map(str, diagnosis(backend)))


def _print_next(session: Session, console: Console) -> None:
    """Print what a run without failures shows, and suggest next steps."""
    if session.backend:
        name = session.backend[0]
        text = f"Whatever {name} computed here agrees with the definitions, within bounds."
        steps = ("--level full tries more cases", "precondattn bench measures its speed")
    else:
        text = "Every mechanism that was computed here agrees with its definition, within bounds."
        steps = (
            "precondattn explain lucid --library torch: what would run a call",
            "precondattn new-backend NAME: the package of a kernel of your own, with its tests",
        )
    _plainly(console, text, *(f"  {step}" for step in steps))
