"""The check `determinism`: repeated calls give the same bits."""

from __future__ import annotations

import numpy as np

from precondattn.arrays import Arrays
from precondattn_conformance.checks.check import Check, Measured, Trial
from precondattn_conformance.disagreement import require_same
from precondattn_conformance.libraries import SHARING

REPEATS = 3
"""The number of repeated calls before any other call."""
MORE_REPEATS = 8
"""The number of further repeats when a later comparison fails: a rare race may not show at
first."""


class Determinism(Check):
    """The same inputs give the same bits, whatever was called in between and in which arrays.

    First the same call is repeated: a difference means a race or unwritten memory. Then there is a
    call with other inputs, and one with those written into the first arrays: a difference means
    something was kept from an earlier call. No call changes the results of another one, and a
    pullback can be called twice.
    """

    name = "determinism"
    snippet = """out, pullback = mechanism.vjp(**inputs, backend={backend})
again, _ = mechanism.vjp(**inputs, backend={backend})  # It has the same bits."""

    def run(self, trial: Trial) -> Measured:
        trial.require_outputs()
        first = trial.results()
        before = _all(trial, first)
        _require_repeatable(trial, before, REPEATS)
        other = _all(trial, trial.results(trial.arrays(trial.reversed_inputs)))
        _require_same(trial, before, _all(trial, first), "was changed by a later call")
        after = _all(trial, trial.results())
        _require_same(trial, before, after, "differs after a call with other inputs")
        if not trial.no_gradient:
            once, twice = _called_twice(trial)
            _require_same(trial, before, once, "differs after a call with other inputs")
            _require_same(trial, once, twice, "differs when the same pullback is called again")
        if trial.case.library in SHARING:
            arrays = trial.arrays(trial.numpy_inputs)
            trial.results(arrays)
            for name, array in trial.arrays(trial.reversed_inputs).items():
                arrays[name][...] = array
            overwritten = _all(trial, trial.results(arrays))
            reason = "differs if the inputs are written into the arrays of an earlier call"
            _require_same(trial, other, overwritten, reason)
        return trial.agree({"the output": (before["the output"], trial.expected.out)})


def _require_repeatable(trial: Trial, before: Arrays, repeats: int) -> None:
    """Raise a DisagreementError if immediate repeats of a call differ in any bit."""
    for number in range(2, repeats + 2):
        for what, array in _all(trial, trial.results()).items():
            require_same(
                what,
                array,
                before[what],
                f"is not deterministic: call {number} gave other bits than call 1, with the same "
                "inputs; look for a race, an order of sums that varies, or unwritten memory",
                trial.axes(what),
                (f"in call {number}", "in call 1"),
            )


def _require_same(trial: Trial, expected: Arrays, results: Arrays, reason: str) -> None:
    """Raise a DisagreementError for this reason, or for a race in the plain call."""
    for what, array in expected.items():
        if np.array_equal(results[what], array, equal_nan=True):
            continue
        _require_repeatable(trial, _all(trial, trial.results()), MORE_REPEATS)
        axes, words = trial.axes(what), ("found", "before")
        require_same(what, results[what], array, reason, axes, words)


def _called_twice(trial: Trial) -> tuple[Arrays, Arrays]:
    """The output with the gradients of the first and of the second call of one pullback."""
    out, pullback = trial.mechanism.vjp(**trial.inputs, **trial.masks, backend=trial.backend)
    cotangent = trial.cotangent()
    first = _all(trial, (out, pullback(cotangent)))
    second = _all(trial, (out, pullback(cotangent)))
    trial.require_same_cotangent(cotangent)
    return first, second


def _all(trial: Trial, results: tuple[object, dict[str, object]]) -> Arrays:
    """Copies of the output and the gradients as NumPy arrays, by name."""
    out, gradients = results
    arrays = {"the output": out, **{f"the gradient of {n}": g for n, g in gradients.items()}}
    return {what: trial.numpy(array).copy() for what, array in arrays.items()}
