"""The dtypes of outputs and gradients."""

from __future__ import annotations

import numpy as np

from precondattn.arrays import exact_device
from precondattn_conformance.checks.check import Check, Measured, Trial
from precondattn_conformance.disagreement import DisagreementError


class Dtypes(Check):
    """An output has v's dtype, and a gradient its input's dtype; both are on the inputs' device.

    The other checks measure the accuracy in each dtype: a float64 result that was computed in
    float32 is off by 1e-7, where 1e-10 is allowed.
    """

    name = "dtypes"
    is_plain = True

    def run(self, trial: Trial) -> Measured:
        trial.require_outputs()
        out, gradients = trial.results()
        _require_alike("the output", out, next(iter(trial.inputs.values())), trial)
        for name, gradient in gradients.items():
            _require_alike(f"the gradient of {name}", gradient, trial.inputs[name], trial)
            if tuple(gradient.shape) != tuple(trial.inputs[name].shape):
                raise DisagreementError(
                    f"the gradient of {name} has the shape {tuple(gradient.shape)}, not "
                    f"{tuple(trial.inputs[name].shape)}"
                )
        return trial.agree({"the output": (trial.numpy(out), trial.expected.out)})


def _require_alike(what: str, result: object, like: object, trial: Trial) -> None:
    dtype = trial.library.dtype_name(result)
    if dtype != trial.case.dtype:
        raise DisagreementError(f"{what} is of {dtype}, not of {trial.case.dtype}")
    # A NumPy array without axes often becomes a NumPy scalar.
    if type(result) is not type(like) and not isinstance(result, np.generic):
        raise DisagreementError(f"{what} is a {type(result).__name__}, not a {type(like).__name__}")
    found, expected = exact_device(result), exact_device(like)
    if found != expected:
        raise DisagreementError(f"{what} is on {found}, not on {expected}")
