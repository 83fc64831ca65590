"""The check of conventions: a small call that needs one, and the same call without that need."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import precondattn as pa
from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Check, Measured, Trial
from precondattn_conformance.checks.future import before_a_key
from precondattn_conformance.conventions import (
    BOTTOM_RIGHT,
    HEAD_ORDER,
    HIDDEN_NAN,
    PROBE,
    PROBES,
    meaning,
    needed,
    with_equal_heads,
)
from precondattn_conformance.disagreement import DisagreementError


class Conventions(Check):
    """A convention holds, whether it is promised or not: one small call that needs it is right.

    A convention is broken if that call is wrong, and the call is right once the convention does not
    matter. A run tests the conventions that are not promised, and those that a failed case needs.
    """

    name = PROBE
    is_plain = True

    def applies(self, case: Case) -> bool:
        return case.layout.name in PROBES and case.layout.name in needed(case)

    def run(self, trial: Trial) -> Measured:
        convention = trial.case.layout.name
        if not self.applies(trial.case):
            raise pa.UnsupportedError(f"{trial.case.mechanism} has no call that needs {convention}")
        try:
            return _error(replace(trial, unpromised=trial.unpromised - {convention}), convention)
        except DisagreementError as error:
            try:
                _error(_without(trial, convention), convention)
            except DisagreementError as other:
                raise pa.UnsupportedError(
                    f"{trial.under_test} is wrong where {convention} does not matter: {other}"
                ) from None
            broken = f"{trial.case.mechanism} breaks {meaning(convention)}"
            raise error.saying(f"{broken}: {error}") from None


def _error(trial: Trial, convention: str) -> Measured:
    trial.require_support()
    if convention == HIDDEN_NAN:
        with np.errstate(all="ignore"):
            return Measured(before_a_key(trial, np.nan), trial.bound)
    return trial.agree(trial.pairs_of(trial.call()))


def _without(trial: Trial, convention: str) -> Trial:
    """The trial changed so that the convention does not matter."""
    case = trial.case
    if convention == BOTTOM_RIGHT:
        case = replace(case, layout=case.layout._replace(t=case.layout.s))
    if convention == HEAD_ORDER:
        case = with_equal_heads(case)
    return replace(trial, case=case, unpromised=trial.unpromised | {convention})
