"""The arrays of a case's call, given its id, for the code of a snippet."""

from __future__ import annotations

import precondattn as pa
from precondattn.arrays import Arrays
from precondattn_conformance import libraries
from precondattn_conformance.cases import case_of
from precondattn_conformance.checks.caching import empty_cache, ends_of, steps
from precondattn_conformance.checks.check import Trial
from precondattn_conformance.oracle import Oracle


def _trial(text: str, device: str | None) -> Trial:
    case = case_of(text)
    return Trial(case, libraries.named(case.library, device), None)


def call_of(
    text: str, device: str | None = None, *, turned: bool = False
) -> tuple[pa.Mechanism, Arrays]:
    """The mechanism of a case, and the inputs and masks of its call.

    If `turned`, the sequences of the batch are in reversed order, which changes values but not
    shapes.
    """
    trial = _trial(text, device)
    with trial.library.precision(trial.case.dtype):
        inputs = trial.arrays(trial.reversed_inputs) if turned else trial.inputs
        return trial.mechanism, inputs | trial.masks


def expected_of(text: str, device: str | None = None) -> Oracle:
    """The oracle's output, cotangent and gradients, as arrays of the case's library.

    Output and gradients are in float64; in JAX they are in float32 unless the case is in float64.
    The cotangent has the case's dtype and order in memory.
    """
    trial = _trial(text, device)
    dtype = trial.case.dtype
    wide = "float32" if trial.case.library == "jax" and dtype != "float64" else "float64"
    with trial.library.precision(dtype):
        right = trial.expected
        return right.with_arrays(
            inputs=trial.inputs,
            masks=trial.masks,
            out=trial.library.array(right.out, wide),
            cotangent=trial.cotangent(),
            gradients=trial.arrays(right.gradients, wide),
        )


def cache_of(text: str, device: str | None = None) -> tuple[pa.Cache, list[Arrays]]:
    """The empty cache of a case, and the tokens that each call of `extend` adds to it."""
    trial = _trial(text, device)
    layout = trial.case.layout
    one_by_one = trial.case.check == "splits"
    ends = list(range(1, layout.t + 1)) if one_by_one else ends_of(layout)
    with trial.library.precision(trial.case.dtype):
        return empty_cache(trial), [step.new | step.masks for step in steps(trial, ends)]
