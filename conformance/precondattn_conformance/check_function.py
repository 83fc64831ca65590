"""`check(function, "kda")`: whether a function computes a mechanism, in one call.

The suite runs on the function as on a backend, in this process. The result lists what the function
declines beside what was compared. If its plain call is wrong, conventions that would explain it are
tried (`diagnosis.py`).
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import precondattn as pa
from precondattn.dispatch.discovery import register_backend, unregister_backend
from precondattn_conformance.declines import declared
from precondattn_conformance.enough import CheckShare, shares
from precondattn_conformance.functions.arrangement import Arrangement
from precondattn_conformance.functions.backend import FunctionBackend, backend_from_function
from precondattn_conformance.functions.diagnosis import Finding, diagnosis
from precondattn_conformance.functions.parameters import Function, Parameters, State
from precondattn_conformance.inputs import CallLayout
from precondattn_conformance.promises import BROKEN, UNPROMISED, Promise
from precondattn_conformance.report.refusal import in_few_words
from precondattn_conformance.runner import Outcome
from precondattn_conformance.session import Session
from precondattn_conformance.status import COMPARED, FAILED, UNSUPPORTED

NO_PARAMETER = re.compile(r"has no parameter for (?:the option |the input )?(.+)")
SHOWN = 5
"""The number of failures in a summary."""

HINTS: tuple[tuple[str, str, str, str, Callable[[CallLayout], bool]], ...] = (
    (
        *("widths", '"equal"', "values narrower than keys", "zeros are appended to the values"),
        lambda layout: layout.e < layout.d,
    ),
    (
        *("heads", '"equal"', "grouped heads", "key and value heads are repeated"),
        lambda layout: layout.n < layout.h or layout.values_per_head > 1,
    ),
    (
        *("multiple", "64", "a number of tokens that is no multiple of 64"),
        *("zeros are appended to the tokens", lambda layout: layout.t % 64 != 0),
    ),
)
"""Options of an arrangement, what each does for which calls, and whether a call is one of these."""


@dataclass(frozen=True)
class CheckResult:
    """The result of `check`; true if the function passed. In a notebook it is shown as a table."""

    name: str
    mechanism: str
    outcomes: tuple[Outcome, ...]
    findings: tuple[Finding, ...] = ()
    """What the function computes instead, if its plain call is wrong."""
    notes: tuple[str, ...] = ()
    """Notes on how it was called, if its parameters' names do not say so, and on how to compare
    more."""
    promises: tuple[Promise, ...] = ()
    """Each convention, with whether it is promised and whether it holds."""
    declines: tuple[str, ...] = ()
    """Parts of the suite that its signature or arguments decline. Others are found by calling
    it."""

    @property
    def passed(self) -> bool:
        """Whether something was compared, and all of it was right."""
        return bool(self.compared) and not self.failures

    @property
    def failures(self) -> tuple[Outcome, ...]:
        return tuple(each for each in self.outcomes if each.status == FAILED)

    @property
    def compared(self) -> tuple[Outcome, ...]:
        return tuple(each for each in self.outcomes if each.status in COMPARED)

    @property
    def declined(self) -> dict[str, int]:
        """Reasons why cases were not compared, with the number of cases for each."""
        reasons = (in_few_words(o.reason) for o in self.outcomes if o.status == UNSUPPORTED)
        # The suite asks about the whole mechanism, then about each leaf; a leaf is never computed
        # alone.
        of_leaves = f"; computes {self.mechanism} only"
        return dict(Counter(reason.removesuffix(of_leaves) for reason in reasons).most_common())

    @property
    def _declined(self) -> list[str]:
        """A line for each reason; all parameters that the function lacks share one line."""
        missing, lines, total = Counter[str](), list[str](), 0
        for why, count in self.declined.items():
            match = NO_PARAMETER.fullmatch(why)
            if match is None:
                lines.append(f"declined ({count}): {why}")
                continue
            total += count
            for name in match[1].split(", "):
                missing[name] += count
        if not missing:
            return lines
        names = ", ".join(f"{name} ({count})" for name, count in missing.most_common())
        return [f"declined ({total}): has no parameter for {names}", *lines]

    @property
    def told(self) -> tuple[Promise, ...]:
        """The conventions that are not promised or do not hold."""
        return tuple(each for each in self.promises if each.verdict in (BROKEN, UNPROMISED))

    @property
    def outputs_only(self) -> dict[str, int]:
        """Reasons why no gradients were compared, with the number of cases for each."""
        measured = (o.measured for o in self.outcomes if o.measured is not None)
        reasons = (in_few_words(m.outputs_only) for m in measured if m.outputs_only)
        return dict(Counter(reasons).most_common())

    @property
    def by_check(self) -> dict[str, tuple[int, int, int]]:
        """For each check, the numbers of passed, failed and all cases."""
        statuses: dict[str, list[str]] = {}
        for outcome in self.outcomes:
            statuses.setdefault(outcome.case.check, []).append(outcome.status)
        return {
            name: (sum(s in COMPARED for s in of) - of.count(FAILED), of.count(FAILED), len(of))
            for name, of in statuses.items()
        }

    @property
    def partial(self) -> tuple[CheckShare, ...]:
        """The checks of which less than half was compared, besides what its parameters decline.

        This does not make the result a failure, because nobody has declared what the function
        should compute. In a run of the command it does.
        """
        of_checks = shares(self.outcomes, declared(self.declines))
        return tuple(share for share in of_checks if not share.is_enough)

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        lines = [
            f"{name}: {right + wrong} of {count} compared" + (f", {wrong} wrong" if wrong else "")
            for name, (right, wrong, count) in self.by_check.items()
        ]
        parts = (*map(str, self.findings), *self.notes, *lines, *self._more)
        return "\n  ".join([self.verdict, *parts])

    __repr__ = __str__

    @property
    def _more(self) -> list[str]:
        """Lines on conventions, on what was declined, and on the first failures."""
        lines = [*map(str, self.told), *self._declined]
        lines += [f"in outputs only ({n}): {why}" for why, n in self.outputs_only.items()]
        lines += [f"failed {o.case.id}: {o.reason}" for o in self.failures[:SHOWN]]
        if len(self.failures) > SHOWN:
            lines.append(f"... and {len(self.failures) - SHOWN} more failures")
        return lines

    @property
    def verdict(self) -> str:
        right = len(self.compared) - len(self.failures)
        counts = f"{right} right, {len(self.failures)} wrong"
        what = "computes" if self.passed else "does not compute"
        if self.passed and self.partial:
            what = "is right where it could be compared with"
        if not self.compared:
            what = "could not be compared with"
        of = f"{len(self.compared)} of {len(self.outcomes)} cases compared"
        return f"{self.name} {what} {self.mechanism}: {of}, {counts}"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{right}</td><td>{wrong}</td><td>{count}</td></tr>"
            for name, (right, wrong, count) in self.by_check.items()
        )
        notes = (*map(str, self.findings), *self.notes, *self._more)
        listed = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
        return (
            f"<p><b>{html.escape(self.verdict)}</b></p><ul>{listed}</ul>"
            "<table><tr><th>check</th><th>right</th><th>wrong</th><th>cases</th></tr>"
            f"{rows}</table>"
        )


def check(
    function: Function,
    mechanism: str | pa.Mechanism,
    *,
    layout: str = "bthd",
    heads: str = "grouped",
    multiple: int = 1,
    widths: str = "any",
    dtypes: Iterable[str] | None = None,
    gradient: bool = True,
    inputs: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
    state: State | tuple[str, str] | None = None,
    library: str | None = None,
    promises: frozenset[str] = pa.CONVENTIONS,
    device: str | None = None,
    level: str = "smoke",
    checks: Iterable[str] = (),
    progress: bool = True,
) -> CheckResult:
    """Compare a function with the definition of a mechanism, by all checks of the suite.

    Parameters
    ----------
    function : callable
        A function of arrays of PyTorch, JAX or NumPy. `backend_from_function` describes it, and the
        parameters that are not listed here.
    mechanism : str or Mechanism
        The mechanism that it should compute.
    device : str, optional
        The device, in the array library's name for it.
    level : {"smoke", "full", "stress"}
    checks : iterable of str
        The checks to run; by default all.
    progress : bool
        Whether to show the progress.

    Raises
    ------
    TypeError
        if the parameters do not fit, or the function can not be called with arrays of any library.

    Examples
    --------
    >>> import numpy as np
    >>> def mean_of_past(q, k, v):
    ...     return np.cumsum(v, axis=1) / np.arange(1, v.shape[1] + 1)[:, None, None]
    >>> result = check(mean_of_past, "softmax", library="numpy", heads="equal", progress=False,
    ...     checks=["outputs"])
    >>> result.passed
    False
    """
    backend = backend_from_function(
        function,
        mechanism,
        library=library,
        layout=layout,
        heads=heads,
        multiple=multiple,
        widths=widths,
        dtypes=dtypes,
        gradient=gradient,
        inputs=inputs,
        options=options,
        state=state,
        device=device,
        promises=promises,
    )
    return checked(backend, device=device, level=level, checks=checks, progress=progress)


def checked(
    backend: FunctionBackend,
    *,
    device: str | None = None,
    level: str = "smoke",
    checks: Iterable[str] = (),
    progress: bool = True,
) -> CheckResult:
    """Check a function that is already wrapped as a backend."""
    register_backend(backend)
    try:
        session = Session(
            backend=(backend.name,),
            level=level,
            device=device,
            libraries=tuple(sorted(backend.libraries)),
            mechanisms=(str(backend.mechanism),),
            checks=tuple(checks),
            jobs=0,
        )
        outcomes = tuple(_shown(session, progress=progress))
        promises = tuple(session.promises(outcomes))
        wrong = any(each.status == FAILED for each in outcomes)
        findings = tuple(diagnosis(backend)) if wrong else ()
    finally:
        unregister_backend(backend.name)
    return CheckResult(
        backend.name,
        str(backend.mechanism),
        outcomes,
        findings,
        notes=(*_notes_on(backend.parameters), *_hints(outcomes, backend.arrangement)),
        promises=promises,
        declines=backend.declines,
    )


def _notes_on(parameters: Parameters) -> Iterator[str]:
    if parameters.by_position:
        yield f"called by position: {', '.join(parameters.inputs)}"
    if parameters.unused:
        yield f"parameters that keep their defaults: {', '.join(parameters.unused)}"


def _hints(outcomes: Sequence[Outcome], arrangement: Arrangement) -> Iterator[str]:
    """Hints at options that allow more comparisons, if every call of a kind raised an error.

    An option is never chosen automatically, since the error may be a fault of the function.
    """
    declined = [o for o in outcomes if o.status == UNSUPPORTED]
    raised = [o.case.layout for o in declined if in_few_words(o.reason).startswith("raised")]
    compared = [o.case.layout for o in outcomes if o.status in COMPARED]
    for name, setting, calls, does, concerns in HINTS:
        count = sum(map(concerns, raised))
        is_default = getattr(arrangement, name) == getattr(Arrangement(), name)
        if is_default and count and not any(map(concerns, compared)):
            yield (
                f"{name}: no call with {calls} ran ({count} declined); with "
                f"{name}={setting}, {does}"
            )


def _shown(session: Session, *, progress: bool) -> list[Outcome]:
    """The outcomes of a run, with a progress bar in a terminal or a notebook."""
    from rich.console import Console

    from precondattn_conformance.progress import Progress

    todo = session.cases()
    running = session.run(todo, session.expectations(todo))
    if not progress:
        return list(running)
    outcomes = []
    with Progress(Console(), len(todo)) as bar:
        for outcome in running:
            outcomes.append(outcome)
            bar.advance(is_failed=outcome.status == FAILED)
    return outcomes
