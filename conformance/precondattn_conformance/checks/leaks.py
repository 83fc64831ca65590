"""Memory that does not come back."""

from __future__ import annotations

import gc
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from precondattn_conformance.checks.check import Check, Measured, Trial
from precondattn_conformance.disagreement import DisagreementError

if TYPE_CHECKING:
    from precondattn_conformance.case import Case

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
        held = [_held(trial)]
        for _ in range(2):
            for _ in range(CALLS):
                out, _ = trial.vjp()
            held.append(_held(trial))
        output = 4 * int(trial.expected.out.size)
        # An allocator that takes more for once is no leak.
        grown = min(after - before for before, after in pairwise(held)) / CALLS
        if grown > SHARE * output:
            raise DisagreementError(
                f"each call leaves {grown / 2**20:.1f} MiB behind; its output has "
                f"{output / 2**20:.1f} MiB"
            )
        return trial.agree({"the output": (trial.numpy(out), trial.expected.out)})


def _held(trial: Trial) -> int:
    """Bytes."""
    from precondattn_conformance.bench.memory import give_back

    gc.collect()
    give_back()
    if trial.library.name == "torch" and str(trial.library.device or "").startswith("cuda"):
        import torch

        return int(torch.cuda.memory_allocated())
    status = Path("/proc/self/statm")
    if not status.exists():
        return 0
    return int(status.read_text().split()[1]) * 4096
