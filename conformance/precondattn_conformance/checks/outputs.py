"""The check `outputs`: the output of a full call."""

from __future__ import annotations

from precondattn_conformance.checks.check import Check, Measured, Trial


class Outputs(Check):
    """The output equals the oracle's, under every mask, at every size, for every kind of keys."""

    name = "outputs"
    is_plain = True

    def run(self, trial: Trial) -> Measured:
        trial.require_support()
        out = trial.call()
        trial.require_purity()
        return trial.agree({"the output": (trial.numpy(out), trial.expected.out)})
