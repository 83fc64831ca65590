"""The check `strides`: arrays that are not contiguous in memory."""

from __future__ import annotations

from contextlib import suppress

from precondattn import UnsupportedError
from precondattn_conformance.case import Case
from precondattn_conformance.checks.caching import Caching, extended
from precondattn_conformance.checks.check import VJP, Check, Measured, Trial
from precondattn_conformance.memory_order import VIEWS


class StridedInputs(Check):
    """Inputs and cotangents may be views: transposed, every other element, or a window.

    The output and the gradients equal those for contiguous inputs, and no memory around a view is
    read or written. JAX has no views.
    """

    name = "strides"
    snippet = f"# The check passes views.\n{VJP}"

    def applies(self, case: Case) -> bool:
        return case.library != "jax"

    def run(self, trial: Trial) -> Measured:
        trial.require_outputs()
        worst = 0.0
        for order in VIEWS:
            views = {n: trial.library.view(array, order) for n, array in trial.inputs.items()}
            out, gradients = trial.results(views, order=order)
            pairs = trial.pairs_of(out, gradients).items()
            named = {f"from {order}, {what}": pair for what, pair in pairs}
            worst = max(worst, trial.agree(named).error)
        trial.require_purity()
        if Caching().applies(trial.case):
            time, what = trial.case.layout.t, f"from {VIEWS[0]}, the extended output"
            with suppress(UnsupportedError):  # A backend may support full calls only.
                pair = extended(trial, [time - 2, time], [trial.backend], order=VIEWS[0])
                worst = max(worst, trial.agree({what: pair}).error)
        return Measured(worst, trial.bound)
