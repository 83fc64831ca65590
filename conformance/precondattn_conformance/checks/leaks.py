"""Memory that does not come back."""

from __future__ import annotations

from itertools import pairwise

from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Check, Measured, Trial
from precondattn_conformance.disagreement import DisagreementError
from precondattn_conformance.memory import held_bytes

WARM, CALLS = 4, 8
SHARE = 0.5
"""Of an output's size, in each call; a leak keeps at least one whole array."""


class Leaks(Check):
    """Calls leave nothing behind: after a few, memory no longer grows with their number.

    The process's resident memory on a CPU, the allocator's on a GPU, over twice 8 calls with a
    gradient, against the size of the output. Where the system does not tell, it is not checked.
    """

    name = "leaks"

    def applies(self, case: Case) -> bool:
        return case.library != "jax" and case.layout.name == "leak"

    def run(self, trial: Trial) -> Measured:
        trial.explain("vjp")
        for _ in range(WARM):
            trial.vjp()
        held = [held_bytes(trial.library)]
        for _ in range(2):
            for _ in range(CALLS):
                out, _ = trial.vjp()
            held.append(held_bytes(trial.library))
        output = 4 * int(trial.expected.out.size)
        # An allocator that takes more for once is no leak.
        grown = min(after - before for before, after in pairwise(held)) / CALLS
        if grown > SHARE * output:
            raise DisagreementError(
                f"each call leaves {grown / 2**20:.1f} MiB behind; its output has "
                f"{output / 2**20:.1f} MiB"
            )
        return trial.agree({"the output": (trial.numpy(out), trial.expected.out)})
