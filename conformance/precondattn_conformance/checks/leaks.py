"""The check `leaks`: memory that is not released after a call."""

from __future__ import annotations

from itertools import pairwise

from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import Check, Measured, Trial
from precondattn_conformance.disagreement import DisagreementError
from precondattn_conformance.memory import held_bytes

WARM, CALLS = 4, 8
SHARE = 0.5
"""The allowed growth per call, as a share of the output's size. A leak keeps a whole array."""


class Leaks(Check):
    """After a few calls, memory no longer grows with the number of calls.

    One call is compared with the oracle first, since no other check has as many elements. The
    growth is measured over two rounds of 8 calls with gradients, relative to the size of the
    output. It is the growth of the process's own memory on a CPU, without mapped files, and of the
    allocator's on a GPU. If the system reports neither, nothing is checked.
    """

    name = "leaks"
    is_plain = True

    def applies(self, case: Case) -> bool:
        return case.library != "jax" and case.layout.name == "leak"

    def run(self, trial: Trial) -> Measured:
        trial.require_outputs()
        measured = _agreed(trial)
        for _ in range(WARM):
            trial.results()
        bytes_held = [held_bytes(trial.library)]
        for _ in range(2):
            for _ in range(CALLS):
                trial.results()
            bytes_held.append(held_bytes(trial.library))
        output = 4 * int(trial.expected.out.size)
        # An allocator that grows once is not a leak, so the smaller growth counts.
        grown = min(after - before for before, after in pairwise(bytes_held)) / CALLS
        if grown > SHARE * output:
            raise DisagreementError(
                f"each call keeps {grown / 2**20:.1f} MiB after its results were released; its "
                f"output has {output / 2**20:.1f} MiB, and {SHARE:g} times that is allowed. Look "
                "for arrays that are kept between calls: residuals, workspaces, a cache without "
                "an end"
            )
        return measured


def _agreed(trial: Trial) -> Measured:
    """The error of one call. A result that is wrong at this size is reported before any leak."""
    out, gradients = trial.results()
    pairs = {"the output": (trial.numpy(out), trial.expected.out)}
    pairs |= trial.pairs_of_gradients(gradients)
    try:
        return trial.agree(pairs, trial.terms_of_gradients())
    except DisagreementError as error:
        raise error.saying(f"no leak, but a wrong result: {error}") from None
