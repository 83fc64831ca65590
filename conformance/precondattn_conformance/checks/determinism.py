"""The same call, twice, with another one in between."""

from __future__ import annotations

import numpy as np

from precondattn_conformance.checks.check import Check, Measured, Trial
from precondattn_conformance.disagreement import DisagreementError
from precondattn_conformance.inputs import Arrays

MUTABLE = ("numpy", "torch", "cupy")


class Determinism(Check):
    """The same values give the same bits, whatever was called in between and in which arrays.

    What is different the second time has read memory that nobody wrote, raced, or kept something
    of a call before: it is called with other values in between, and then with those written into
    the first arrays. No call changes the results of another one, and a gradient can be asked for
    twice.
    """

    name = "determinism"

    def run(self, trial: Trial) -> Measured:
        trial.explain("vjp")
        first = trial.vjp()
        before = _all(trial, first)
        other = _all(trial, trial.vjp(trial.arrays(trial.opposite)))
        _require_same(before, _all(trial, first), "was changed by a later call")
        _require_same(before, _all(trial, trial.vjp()), "is another one the second time")
        _require_same(before, _all(trial, trial.vjp(twice=True)), "is spent by the first pullback")
        if trial.case.library in MUTABLE:
            arrays = trial.arrays(trial.values)
            trial.vjp(arrays)
            for name, array in trial.arrays(trial.opposite).items():
                arrays[name][...] = array
            overwritten = _all(trial, trial.vjp(arrays))
            _require_same(other, overwritten, "is that of values that were overwritten since")
        return trial.agree({"the output": (before["the output"], trial.expected.out)})


def _require_same(wanted: Arrays, found: Arrays, reason: str) -> None:
    for what, array in wanted.items():
        if not np.array_equal(array, found[what], equal_nan=True):
            worst = float(np.max(np.abs(array - found[what])))
            raise DisagreementError(f"{what} {reason}, by {worst:.3g}")


def _all(trial: Trial, found: tuple[object, dict[str, object]]) -> Arrays:
    out, gradients = found
    arrays = {"the output": out, **{f"the gradient of {n}": g for n, g in gradients.items()}}
    return {what: trial.numpy(array).copy() for what, array in arrays.items()}
