"""The checks of the plain call and its gradient, and a test whether that is wrong too elsewhere."""

from __future__ import annotations

import numpy as np

from precondattn.arrays import exact_device
from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Check, Measured, Trial
from precondattn_conformance.declared import is_constant_in_one_token, mechanism_of
from precondattn_conformance.disagreement import DisagreementError
from precondattn_conformance.extremes import EXTREMES, FORWARD_ONLY, makes_sense

WRONG_TOO = "the plain call is wrong too: look at"


class Outputs(Check):
    """The output equals the oracle's, under every mask, at every size, for every kind of keys."""

    name = "outputs"
    is_plain = True

    def run(self, trial: Trial) -> Measured:
        trial.require_support()
        out = trial.call()
        trial.require_purity()
        return trial.agree(trial.pairs_of(out))


class Gradients(Check):
    """The gradients of all inputs are the oracle's, by `vjp` and by PyTorch's and JAX's autograd.

    The oracle's own gradients are checked by central differences. The error of a gradient whose
    terms cancel, such as that of a temperature, is relative to the size of the terms.
    """

    name = "gradients"
    is_plain = True

    def applies(self, case: Case) -> bool:
        # An error relative to a gradient of 0 is meaningless.
        return case.layout.t > 1 or not is_constant_in_one_token(mechanism_of(case.mechanism))

    def run(self, trial: Trial) -> Measured:
        trial.require_support("vjp")
        out, explicit = trial.vjp()
        pairs = {"the output of vjp": (trial.numpy(out), trial.expected.out)}
        pairs |= trial.pairs_of_gradients(explicit)
        cotangent = trial.cotangent()
        automatic = trial.library.gradients(trial.call, trial.inputs, cotangent)
        pairs |= trial.pairs_of_gradients(automatic or {}, "autograd")
        trial.require_same_cotangent(cotangent)
        trial.require_purity()
        return trial.agree(pairs)


class Stability(Check):
    """Results are accurate for huge, tied and tiny logits, extreme gates and values far apart.

    At every extreme the result is well conditioned, so the bounds are the same. No output and no
    gradient may be infinite or NaN.
    """

    name = "stability"
    is_plain = True

    def applies(self, case: Case) -> bool:
        return case.kind in EXTREMES and makes_sense(mechanism_of(case.mechanism), case.kind)

    def run(self, trial: Trial) -> Measured:
        if trial.case.kind in FORWARD_ONLY:
            trial.require_support()
            return trial.agree(trial.pairs_of(trial.call()))
        trial.require_outputs()
        return trial.agree(trial.pairs_of(*trial.results()))


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
        return trial.agree(trial.pairs_of(out))


def _require_alike(what: str, result: object, like: object, trial: Trial) -> None:
    trial.require_dtype(what, result, trial.case.dtype)
    # A NumPy array without axes often becomes a NumPy scalar.
    if type(result) is not type(like) and not isinstance(result, np.generic):
        raise DisagreementError(f"{what} is a {type(result).__name__}, not a {type(like).__name__}")
    found, expected = exact_device(result), exact_device(like)
    if found != expected:
        raise DisagreementError(f"{what} is on {found}, not on {expected}")


def explained(trial: Trial, error: DisagreementError) -> DisagreementError:
    """The disagreement, with a hint to look at the plain call first if that is wrong too.

    A wrong gradient fails the checks of strides, threads and the order of calls as well.
    """
    is_gradient = "vjp" in error.what or "autograd" in error.what
    if not error.what or not _is_wrong(trial, is_gradient):
        return error
    check = "gradients" if is_gradient else "outputs"
    return error.saying(f"{error}; {WRONG_TOO} `{check}` first")


def _is_wrong(trial: Trial, is_gradient: bool) -> bool:
    """Whether the output, or a gradient, of the plain call is wrong; false if the call raises."""
    try:
        if is_gradient:
            trial.agree(trial.pairs_of_gradients(trial.vjp()[1]))
        else:
            trial.agree(trial.pairs_of(trial.call()))
    except DisagreementError:
        return True
    except Exception:
        return False
    return False
