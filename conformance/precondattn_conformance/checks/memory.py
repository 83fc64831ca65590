"""Checks of memory: what a call keeps, and how its peak grows with the number of tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from precondattn.dispatch.discovery import discover
from precondattn_conformance.case import Case
from precondattn_conformance.checks.check import VJP, Check, Measured, NotRunError, Trial
from precondattn_conformance.disagreement import DisagreementError
from precondattn_conformance.memory import MeasuredCall, held_bytes, peak_bytes

WARM, CALLS = 4, 8
SHARE = 0.5
"""The allowed growth per call, as a share of the output's size. A leak keeps a whole array."""
GROWTH = {"linear": 2.2, "quadratic": 4.4}
"""The largest allowed growth when the number of tokens doubles."""


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
        try:  # A result that is wrong at this size is reported before any leak.
            measured = trial.agree(trial.pairs_of(*trial.results()))
        except DisagreementError as error:
            raise error.saying(f"no leak, but a wrong result: {error}") from None
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
