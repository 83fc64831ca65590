"""The gradient of every input, by `vjp` and by the library's own differentiation."""

from __future__ import annotations

from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Check, Measured, Trial
from precondattn_conformance.declared import is_constant_in_one_token, mechanism_of


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
        return trial.agree(pairs, trial.terms_of_gradients())
