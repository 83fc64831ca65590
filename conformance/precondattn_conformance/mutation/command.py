"""`precondattn conformance --mutate MODULE`: mutants of a kernel, and which of them survive."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from precondattn.dispatch.discovery import discover
from precondattn_conformance.case import Case
from precondattn_conformance.libraries import installed
from precondattn_conformance.mutation.equivalents import equivalents, wrong_equivalents
from precondattn_conformance.mutation.mutant import Mutant
from precondattn_conformance.mutation.order import CaseOrder
from precondattn_conformance.mutation.process import Setting
from precondattn_conformance.mutation.record import MutationRecord
from precondattn_conformance.mutation.report import print_counts, print_survivors, survivors
from precondattn_conformance.mutation.run import MutationProcesses, baselines, verdicts
from precondattn_conformance.mutation.target import Target, targets
from precondattn_conformance.session import Session
from precondattn_conformance.writable import require_writable

LEFT_OUT = ("threads", "leaks", "memory", "sharding", "dynamic_shapes", "transforms")
"""Checks of a process or of a compiler rather than of arithmetic. They take seconds per mutant, and
are left out by default."""
SAVED_EVERY = 20.0
"""Seconds between two saves of the record."""


def mutate(
    session: Session,
    modules: Sequence[str],
    console: Console,
    *,
    inside: str | None = None,
    record: Path | None = None,
    equivalent: Path | None = None,
    most_cases: int | None = None,
) -> int:
    """Run the cases on every mutant of modules; returns exit code 1 if one survives.

    `inside` names a context manager in which the cases run: "my_tests.tiles:small_tiles". Each
    mutant runs at most `most_cases` cases; cases of different checks, mechanisms and data come
    first. `equivalent` is a file that lists mutants that compute the same result
    (`equivalents.py`). After Ctrl-C the results so far are in the record, and the exit code is 130.

    Raises
    ------
    ValueError
        if the module, a filter or a file is invalid, or no case uses the module.
    """
    require_writable(record)
    mutated = [each for module in modules for each in targets(module)]
    session = _of_one_library(session)
    mutants = [mutant for each in mutated for mutant in each.mutants()]
    if not mutants:
        names = ", ".join(modules)
        raise ValueError(f"{names} has nothing to change: no operator, comparison or number")
    known = equivalents([each.name for each in mutated], equivalent)
    kept = MutationRecord(mutated, record)
    options = described(session, inside, most_cases)
    todo = [
        m for m in mutants if (m.target, m.key) not in known and kept.entry_of(m).needs(options)
    ]
    is_interrupted = False
    if todo:
        processes = MutationProcesses(
            Setting(tuple(mutated), session.backend or None, session.device, inside),
            session.jobs or 1,
        )
        try:
            _run(session, mutated, todo, kept, options, processes, console, most_cases)
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            processes.stop()
            kept.save()
    print_survivors(kept, known, console)
    print_counts(kept, known, console)
    wrong = wrong_equivalents(known, kept)
    for line in wrong:
        console.print(f"[red]wrong in the list of equivalents[/red]: {escape(line)}")
    if is_interrupted:
        return 130
    return 1 if wrong or any(survivors(kept, known).values()) else 0


def _run(
    session: Session,
    targets: Sequence[Target],
    todo: list[Mutant],
    kept: MutationRecord,
    options: str,
    processes: MutationProcesses,
    console: Console,
    most_cases: int | None,
) -> None:
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[survived]} survived"),
        console=console,
        transient=True,
    ) as progress:
        cases = _cases(session)
        task = progress.add_task("the unchanged code", total=len(cases), survived=0)
        known = baselines(processes, cases, session.seconds, lambda: progress.advance(task))
        if not known:
            raise ValueError(
                f"none of {len(cases)} cases passes and uses {', '.join(t.name for t in targets)}; "
                "does a mechanism of this backend and library use it?"
            )
        progress.update(task, description="mutants", total=len(todo), completed=0)
        survived, saved = 0, time.monotonic()
        for mutant, verdict in verdicts(processes, todo, CaseOrder(known, most_cases)):
            kept.entry_of(mutant).add(verdict, options)
            survived += not kept.entry_of(mutant).is_killed
            progress.update(task, advance=1, survived=survived)
            if time.monotonic() - saved > SAVED_EVERY:
                kept.save()
                saved = time.monotonic()


def _cases(session: Session) -> list[Case]:
    """The session's cases, without checks of a process unless they are named."""
    checks = session.checks
    return [case for case in session.cases() if case.check in checks or case.check not in LEFT_OUT]


def _of_one_library(session: Session) -> Session:
    """The session with one array library: if none is named, the first that the backend supports.

    Another library runs the same lines, and JAX compiles every case of every mutant.
    """
    if session.under_test is None:
        raise ValueError("--mutate needs the backend whose code is changed: --backend NAME")
    if session.libraries or session.ids:
        return session
    has = discover().named(session.under_test).libraries
    found = [name for name in installed() if not has or name in has]
    return replace(session, libraries=tuple(found[:1]))


def described(session: Session, inside: str | None, most_cases: int | None) -> str:
    """The options that determine which cases run, as on the command line."""
    words = [f"--level {session.level}"]
    words += [f"--backend {name}" for name in session.backend]
    for option, values in session.filters.items():
        words += [f"--{option} {value}" for value in values]
    if session.device is not None:
        words.append(f"--device {session.device}")
    if most_cases is not None:
        words.append(f"--most-cases {most_cases}")
    if inside is not None:
        words.append(f"--inside {inside}")
    return " ".join(words)
