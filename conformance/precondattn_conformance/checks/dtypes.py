"""The dtypes of what comes back."""

from __future__ import annotations

import numpy as np

from precondattn_conformance.checks.check import Check, Measured, Trial
from precondattn_conformance.disagreement import DisagreementError


class Dtypes(Check):
    """An output has v's dtype, a gradient that of its input, and both are where the inputs are.

    How accurate they are in each dtype, the other checks show: what computes in float32 and calls
    it float64 is off by 1e-7 where 1e-10 is allowed.
    """

    name = "dtypes"

    def run(self, trial: Trial) -> Measured:
        trial.explain("vjp")
        out, gradients = trial.vjp()
        _require_alike("the output", out, next(iter(trial.inputs.values())), trial)
        for name, gradient in gradients.items():
            _require_alike(f"the gradient of {name}", gradient, trial.inputs[name], trial)
            if tuple(gradient.shape) != tuple(trial.inputs[name].shape):
                raise DisagreementError(
                    f"the gradient of {name} has the shape {tuple(gradient.shape)}, not "
                    f"{tuple(trial.inputs[name].shape)}"
                )
        return trial.agree({"the output": (trial.numpy(out), trial.expected.out)})


def _require_alike(what: str, found: object, like: object, trial: Trial) -> None:
    dtype = trial.library.dtype_name(found)
    if dtype != trial.case.dtype:
        raise DisagreementError(f"{what} is of {dtype}, not of {trial.case.dtype}")
    # A NumPy array without axes often is one of NumPy's scalars.
    if type(found) is not type(like) and not isinstance(found, np.generic):
        raise DisagreementError(f"{what} is a {type(found).__name__}, not a {type(like).__name__}")
    places = [str(getattr(array, "device", "")) for array in (found, like)]
    if places[0] != places[1]:
        raise DisagreementError(f"{what} is on {places[0]}, not on {places[1]}")
