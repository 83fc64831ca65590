"""The check `stability`: inputs at which a naive formula overflows, underflows or cancels."""

from __future__ import annotations

from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Check, Measured, Trial
from precondattn_conformance.declared import mechanism_of
from precondattn_conformance.extremes import EXTREMES, FORWARD_ONLY, makes_sense


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
            return trial.agree({"the output": (trial.numpy(trial.call()), trial.expected.out)})
        trial.require_outputs()
        out, gradients = trial.results()
        pairs = {"the output": (trial.numpy(out), trial.expected.out)}
        pairs |= trial.pairs_of_gradients(gradients)
        return trial.agree(pairs, trial.terms_of_gradients())
