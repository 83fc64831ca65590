"""The conventions in a run: which of them the backend promises, and which of them hold.

A promise is kept if all cases that need it agree with the oracle. If one fails, or the convention
is not promised, a small call of one mechanism decides (`checks/conventions.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from precondattn.json_types import JsonObject
from precondattn_conformance.case import Case
from precondattn_conformance.cases import makes_sense
from precondattn_conformance.conventions import (
    FLOAT64,
    MEANING,
    PROBE,
    PROBES,
    needed,
    unpromised_by,
)
from precondattn_conformance.runner import Outcome
from precondattn_conformance.status import COMPARED, FAILED, PASSED, XFAILED

KEPT, BROKEN, UNPROMISED, UNKNOWN = "kept", "broken", "not promised", "not known"


class Promise(NamedTuple):
    """One convention in a run."""

    convention: str
    is_promised: bool
    holds: bool | None
    """Whether it holds; None if no case needed it, or no call could decide."""
    compared: int
    """The number of cases that needed it and were compared."""
    why: str = ""
    """The finding if it does not hold, or why that is unknown."""

    @property
    def verdict(self) -> str:
        """`"kept"`, `"broken"`, `"not promised"` or `"not known"`."""
        if not self.is_promised:
            return UNPROMISED
        return UNKNOWN if self.holds is None else KEPT if self.holds else BROKEN

    def __str__(self) -> str:
        """The convention with its verdict: `bottom_right: not promised, and not kept`."""
        found = {True: ", but kept", False: ", and not kept", None: ""}[self.holds]
        return f"{self.convention}: {self.verdict}{'' if self.is_promised else found}"

    def to_json(self) -> JsonObject:
        return {**self._asdict(), "verdict": self.verdict}


def promises(
    backend: tuple[str, ...],
    outcomes: Sequence[Outcome],
    tried: Callable[[list[Case]], list[Outcome]],
) -> list[Promise]:
    """Every convention, judged by the outcomes of a run and of a few further cases."""
    unpromised = unpromised_by(backend)
    compared = [outcome for outcome in outcomes if outcome.status in COMPARED]
    verdicts: dict[str, Promise] = {}
    cases: dict[str, Case] = {}
    for convention in MEANING:
        is_promised = convention not in unpromised
        needing = [outcome for outcome in compared if convention in needed(outcome.case)]
        failed = [outcome for outcome in needing if outcome.status in (FAILED, XFAILED)]
        # A crash or an exception does not depend on a convention.
        wrong = [outcome for outcome in failed if outcome.measured is not None]
        holds = True if needing and is_promised and not failed else None
        verdicts[convention] = Promise(convention, is_promised, holds, len(needing))
        probe = _probe(convention, wrong or compared) if wrong or not is_promised else None
        if probe is not None:
            cases[convention] = probe
    for outcome in tried(list(cases.values())) if cases else ():
        convention = outcome.case.layout.name
        is_told = outcome.measured is not None
        holds = {PASSED: True, FAILED: False}.get(outcome.status) if is_told else None
        verdicts[convention] = verdicts[convention]._replace(holds=holds, why=outcome.reason)
    return list(verdicts.values())


def _probe(convention: str, outcomes: Sequence[Outcome]) -> Case | None:
    """The call that decides whether a convention holds, of the shortest suitable mechanism."""
    for outcome in sorted(outcomes, key=lambda each: len(each.case.mechanism)):
        case = outcome.case
        dtype = "float32" if case.dtype == FLOAT64 else case.dtype
        dtype = FLOAT64 if convention == FLOAT64 else dtype
        probe = Case(PROBE, case.mechanism, case.library, dtype, PROBES[convention], "random")
        if makes_sense(probe):
            return probe
    return None
