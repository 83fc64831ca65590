"""Tests whether the plain call is wrong too, when a check of something else fails."""

from __future__ import annotations

from precondattn_conformance.checks.check import Trial
from precondattn_conformance.disagreement import DisagreementError

WRONG_TOO = "the plain call is wrong too: look at"


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
            trial.agree(trial.pairs_of_gradients(trial.vjp()[1]), trial.terms_of_gradients())
        else:
            trial.agree({"the output": (trial.numpy(trial.call()), trial.expected.out)})
    except DisagreementError:
        return True
    except Exception:
        return False
    return False
