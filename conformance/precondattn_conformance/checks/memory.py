"""The check `memory`: how peak memory grows with the number of tokens."""

from __future__ import annotations

from dataclasses import replace

from precondattn.dispatch.discovery import discover
from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import VJP, Check, Measured, NotRunError, Trial
from precondattn_conformance.disagreement import DisagreementError
from precondattn_conformance.memory import MeasuredCall, peak_bytes

GROWTH = {"linear": 2.2, "quadratic": 4.4}
"""The largest allowed growth when the number of tokens doubles."""


class Memory(Check):
    """Peak memory grows as the backend declares: `memory = "linear"` or `"quadratic"`.

    It compares 2,048 with 4,096 tokens, for output and gradients, each in a separate process. A
    backend that declares no class is not checked.
    """

    name = "memory"
    snippet = f"# The check doubles the number of tokens.\n{VJP}"

    def applies(self, case: Case) -> bool:
        return case.layout.name == "long" and case.library in ("numpy", "torch")

    def run(self, trial: Trial) -> Measured:
        case = trial.case
        declared = discover().named(trial.under_test).memory if trial.under_test else ""
        if not declared:
            raise NotRunError(f"{trial.under_test} declares no memory class")
        trial.require_support("vjp")
        call = MeasuredCall(
            case.mechanism,
            case.layout,
            case.library,
            case.dtype,
            backend=trial.under_test,
            device=trial.library.device,
        )
        tokens = case.layout.t
        twice = case.layout._replace(t=2 * tokens, s=2 * tokens)
        peaks = [peak_bytes(call), peak_bytes(replace(call, layout=twice))]
        growth = peaks[1] / max(peaks[0], 1.0)
        if growth > GROWTH[declared]:
            raise DisagreementError(
                f"{tokens} tokens take {peaks[0] / 2**20:.1f} MiB, twice as many "
                f"{growth:.2f} times as much, where {GROWTH[declared]} times is allowed; "
                f"{trial.under_test} declares {declared} memory"
            )
        return Measured(0.0, trial.bound)
