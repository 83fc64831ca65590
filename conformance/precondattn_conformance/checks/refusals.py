"""How a backend declines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

import precondattn as pa
from precondattn.backend import Support
from precondattn.frame import Frame
from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Check, Measured, Trial
from precondattn_conformance.declared import mechanism_of
from precondattn_conformance.disagreement import DisagreementError


class Refusals(Check):
    """A refusal has a reason, and a backend claims no leaf that it can not know.

    The backend is offered a leaf with the same options but different mathematics, of a class
    derived from the one it knows: the output is twice as large. A backend that decides by
    `isinstance`, by name or by options claims the leaf and returns a wrong output. A backend that
    runs a leaf's own code is right.
    """

    name = "refusals"

    def applies(self, case: Case) -> bool:
        return len(mechanism_of(case.mechanism).program.leaves) == 1

    def run(self, trial: Trial) -> Measured:
        if trial.under_test is None:
            raise pa.UnsupportedError("no backend was named")
        explanation = trial.mechanism.explain(**trial.inputs, **trial.masks, backend=trial.backend)
        trial.require_used(explanation)
        for considered in explanation.plan.considered:
            if considered.backend == trial.under_test:
                _require_reason(trial.under_test, considered.support)
        (leaf,) = trial.mechanism.program.leaves
        try:
            out = _twice_as_large(leaf)(**trial.inputs, **trial.masks, backend=trial.backend)
        except pa.UnsupportedError:
            return Measured(0.0, trial.bound)
        expected = 2 * trial.expected.out
        return trial.agree({"the output of an unknown mechanism": (trial.numpy(out), expected)})


def _require_reason(name: str, support: Support) -> None:
    if not support.ok and not support.reason.strip():
        raise DisagreementError(f"{name} refuses without a reason")


@cache
def _class_twice_as_large(cls: type[pa.Mechanism]) -> type[pa.Mechanism]:
    """A subclass that is not registered, with its base's name."""

    def forward(self: Any, x: Mapping[str, Any], frame: Frame) -> tuple[Any, Any]:
        out, residuals = cls.forward(self, x, frame)  # type: ignore[attr-defined]
        return 2 * out, residuals

    return type(f"TwiceAsLarge{cls.__name__}", (cls,), {"forward": forward})


def _twice_as_large(leaf: pa.Mechanism) -> pa.Mechanism:
    options = {field.name: getattr(leaf, field.name) for field in fields(leaf) if field.init}
    return _class_twice_as_large(type(leaf))(**options)
