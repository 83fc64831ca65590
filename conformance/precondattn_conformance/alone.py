"""Tests whether a failure depends on earlier calls, by replaying the case alone in a new process.

    the case alone           failed   → the case is all that is needed
                             passed   → something is kept from an earlier call, or failure is random
    after the last 1, 4, 16, … cases of its process, until it fails
    after the last n, with the smallest such n, and after the first of those only

Two causes of failures that pass alone are a cache of compiled kernels that is keyed by shapes only,
and a workspace that is not cleared. Only the first failures of a run are replayed, for at most a
minute in all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Backend, names_of
from precondattn_conformance.runner import Outcome
from precondattn_conformance.snippet import after
from precondattn_conformance.status import FAILED, PASSED

if TYPE_CHECKING:
    from precondattn_conformance.isolation import Worker

REPLAYED = 2
"""The number of failures of a run that are replayed."""
SECONDS = 60.0
"""The time limit in seconds for starting replays in a run."""
LISTED = 8
"""The largest number of earlier cases that the details list; the record lists all."""


class Alone:
    """Replays the first failures of a run, and says which of them depend on earlier calls."""

    def __init__(self, start: Callable[[], Worker], backend: Backend, device: str | None) -> None:
        self.start, self.backend, self.device = start, backend, device
        self.left, self.seconds = REPLAYED, SECONDS

    def judged(self, outcome: Outcome, earlier: Sequence[Case]) -> Outcome:
        """The outcome, with the `earlier` cases of its process on which it depends, if any."""
        if outcome.status != FAILED or outcome.hung or self.left == 0 or self.seconds <= 0:
            return outcome
        self.left -= 1
        start = time.monotonic()
        try:
            if not earlier or self._fails_after((), outcome.case):
                return replace(outcome, alone=FAILED)
            needed = self._shortest(earlier, outcome.case, start)
        finally:
            self.seconds -= time.monotonic() - start
        return self._explained(outcome, earlier, needed)

    def _fails_after(self, earlier: Sequence[Case], case: Case) -> bool:
        """Whether the case fails after these cases in a new process."""
        process = self.start()
        try:
            for each in earlier:
                process.run(each)
            return process.run(case).status == FAILED
        finally:
            process.stop()

    def _shortest(
        self, earlier: Sequence[Case], case: Case, start: float
    ) -> tuple[Case, ...] | None:
        """The fewest of the last cases that suffice. Empty: not even all do; None: no time left."""

        def fails_after_last(count: int) -> bool:
            return self._fails_after(earlier[len(earlier) - count :], case)

        too_few, enough = 0, 1
        while not fails_after_last(enough):
            if enough == len(earlier):
                return ()
            if time.monotonic() - start > self.seconds:
                return None
            too_few, enough = enough, min(4 * enough, len(earlier))
        while enough - too_few > 1 and time.monotonic() - start < self.seconds:
            middle = (too_few + enough) // 2
            if fails_after_last(middle):
                enough = middle
            else:
                too_few = middle
        needed = tuple(earlier[len(earlier) - enough :])
        one = needed[:1]
        return one if enough > 1 and self._fails_after(one, case) else needed

    def _explained(
        self, outcome: Outcome, earlier: Sequence[Case], needed: tuple[Case, ...] | None
    ) -> Outcome:
        """The outcome of a case that passes alone."""
        failed = "failed in the run, passes alone"
        if needed is None:
            reason = f"{failed}: it depends on an earlier call, or on chance"
            last = "\n".join(f"  {case.id}" for case in earlier[-LISTED:])
            details = f"{len(earlier)} cases ran before it in its process; the last ones:\n{last}"
        elif not needed:
            reason = f"{failed} and after the same {len(earlier)} cases: it depends on chance"
            details = "Run it several times; look for a race, or for memory that is not written."
        else:
            reason = f"{failed}: it depends on an earlier call"
            details = (
                f"It fails after {_named(needed)}:\n\n{self._command((*needed, outcome.case))}"
            )
        ids = tuple(case.id for case in needed or ())
        return replace(
            outcome,
            reason=f"{reason}; {outcome.reason}",
            details=f"{details}\n\n{outcome.details}".rstrip(),
            snippet=after(outcome.snippet, outcome.case, ids, self.backend, self.device),
            alone=PASSED,
            after=ids,
        )

    def _command(self, cases: Sequence[Case]) -> str:
        """The command that runs these cases in one process."""
        if len(cases) > LISTED + 1:
            return "  (the code below has their ids)"
        backends = [f" --backend {name}" for name in names_of(self.backend)]
        device = f" --device {self.device}" if self.device else ""
        ids = [f"    --case '{case.id}'" for case in cases]
        command = f"  precondattn conformance --jobs 1{''.join(backends)}{device}"
        return " \\\n".join([command, *ids])


def _named(needed: Sequence[Case]) -> str:
    if len(needed) == 1:
        return needed[0].id
    return f"{len(needed)} earlier cases, of which the first is {needed[0].id}"
