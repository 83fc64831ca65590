"""The same call, twice, with another one in between."""

from __future__ import annotations

import numpy as np

from precondattn_conformance.checks.check import Check, Measured, Trial
from precondattn_conformance.disagreement import DisagreementError


class Determinism(Check):
    """The same inputs give the same bits, also after a call with other values in between.

    What is different the second time has read memory that nobody wrote, raced, or kept something
    of the call before. The first call's results must not change either.
    """

    name = "determinism"

    def run(self, trial: Trial) -> Measured:
        trial.explain("vjp")
        first = trial.vjp()
        before = _all(trial, first)
        # Other values, as valid as these: the sequences in the opposite order.
        inputs = trial.values
        trial.vjp(trial.arrays({n: a[::-1] if a.ndim else a for n, a in inputs.items()}))
        again = _all(trial, trial.vjp())
        for what, array in _all(trial, first).items():
            if not np.array_equal(array, before[what], equal_nan=True):
                raise DisagreementError(f"{what} of a call was changed by a later call")
            if not np.array_equal(array, again[what], equal_nan=True):
                worst = float(np.max(np.abs(array - again[what])))
                raise DisagreementError(f"{what} is another one the second time, by {worst:.3g}")
        return trial.agree({"the output": (before["the output"], trial.expected.out)})


def _all(trial: Trial, found: tuple[object, dict[str, object]]) -> dict[str, np.ndarray]:
    out, gradients = found
    arrays = {"the output": out, **{f"the gradient of {n}": g for n, g in gradients.items()}}
    return {what: trial.numpy(array).copy() for what, array in arrays.items()}
