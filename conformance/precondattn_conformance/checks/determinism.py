"""The same call twice, with another one in between."""

from __future__ import annotations

import numpy as np

from precondattn_conformance.checks.check import Check, Measured, Trial
from precondattn_conformance.disagreement import DisagreementError
from precondattn_conformance.inputs import Arrays

MUTABLE = ("numpy", "torch", "cupy")


class Determinism(Check):
    """The same inputs give the same bits, whatever was called in between and in which arrays.

    A difference means uninitialised memory, a race, or something kept from an earlier call: in
    between there is a call with other inputs, and then one with those written into the first
    arrays. No call changes the results of another one, and a pullback can be called twice.
    """

    name = "determinism"

    def run(self, trial: Trial) -> Measured:
        trial.require_support("vjp")
        first = trial.vjp()
        before = _all(trial, first)
        other = _all(trial, trial.vjp(trial.arrays(trial.reversed_inputs)))
        _require_same(before, _all(trial, first), "was changed by a later call")
        _require_same(before, _all(trial, trial.vjp()), "differs in the second call")
        twice = _all(trial, trial.vjp(twice=True))
        _require_same(before, twice, "differs in the second call of the pullback")
        if trial.case.library in MUTABLE:
            arrays = trial.arrays(trial.numpy_inputs)
            trial.vjp(arrays)
            for name, array in trial.arrays(trial.reversed_inputs).items():
                arrays[name][...] = array
            overwritten = _all(trial, trial.vjp(arrays))
            _require_same(other, overwritten, "belongs to inputs that were overwritten before")
        return trial.agree({"the output": (before["the output"], trial.expected.out)})


def _require_same(expected: Arrays, results: Arrays, reason: str) -> None:
    for what, array in expected.items():
        if not np.array_equal(array, results[what], equal_nan=True):
            worst = float(np.max(np.abs(array - results[what])))
            raise DisagreementError(f"{what} {reason}, by {worst:.3g}")


def _all(trial: Trial, results: tuple[object, dict[str, object]]) -> Arrays:
    """Copies of the output and the gradients in NumPy, by name."""
    out, gradients = results
    arrays = {"the output": out, **{f"the gradient of {n}": g for n, g in gradients.items()}}
    return {what: trial.numpy(array).copy() for what, array in arrays.items()}
