"""A case by its id, for the code of a snippet: its outcome, and the arrays of its call."""

from __future__ import annotations

import precondattn as pa
from precondattn.arrays import Arrays
from precondattn_conformance import libraries
from precondattn_conformance.cases import case_of
from precondattn_conformance.checks.caching import empty_cache, ends_of, steps
from precondattn_conformance.checks.check import Backend, Trial
from precondattn_conformance.oracle import Oracle
from precondattn_conformance.runner import run_case


def _trial(text: str, device: str | None) -> Trial:
    case = case_of(text)
    return Trial(case, libraries.named(case.library, device), None)


def replay(case: str, backend: Backend = None, device: str | None = None) -> str:
    """Run a case by its id, and return its outcome as text.

    Examples
    --------
    >>> replay("outputs-numpy-float64-plain-clustered-lucid", backend="reference").split(":")[0]
    'passed'
    """
    outcome = run_case(case_of(case), backend, device)
    if outcome.measured is None or outcome.reason:
        return f"{outcome.status}: {outcome.reason}\n\n{outcome.details}".rstrip()
    measured = outcome.measured
    return f"{outcome.status}: error {measured.error:.3g}, bound {measured.bound:.1g}"


def call_of(
    case: str, device: str | None = None, *, turned: bool = False
) -> tuple[pa.Mechanism, Arrays]:
    """The mechanism of a case, given by its id, and the inputs and masks of its call.

    If `turned`, the sequences of the batch are in reversed order, which changes values but not
    shapes.

    Examples
    --------
    >>> mechanism, inputs = call_of("outputs-numpy-float64-plain-clustered-lucid")
    >>> mechanism(**inputs, backend="reference").shape
    (2, 7, 4, 6)
    """
    trial = _trial(case, device)
    with trial.library.precision(trial.case.dtype):
        inputs = trial.arrays(trial.reversed_inputs) if turned else trial.inputs
        return trial.mechanism, inputs | trial.masks


def expected_of(case: str, device: str | None = None) -> Oracle:
    """The oracle's results for the call of a case: `out`, `cotangent` and `gradients`.

    They are arrays of the case's library, on the device. The output and the gradients are in
    float64; in JAX they are in float32 unless the case is in float64. The cotangent has the case's
    dtype and order in memory.

    Examples
    --------
    >>> expected = expected_of("gradients-numpy-float32-plain-clustered-lucid")
    >>> expected.gradients["k"].shape, expected.gradients["k"].dtype
    ((2, 7, 2, 8), dtype('float64'))
    """
    trial = _trial(case, device)
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


def cache_of(case: str, device: str | None = None) -> tuple[pa.Cache, list[Arrays]]:
    """The empty cache of a case and, for each call of `extend`, the new tokens and their masks.

    Examples
    --------
    >>> cache, steps = cache_of("caching-numpy-float64-plain-clustered-lucid")
    >>> [new["q"].shape[1] for new in steps]
    [1, 2, 1, 1, 2]
    """
    trial = _trial(case, device)
    layout = trial.case.layout
    one_by_one = trial.case.check == "splits"
    ends = list(range(1, layout.t + 1)) if one_by_one else ends_of(layout)
    with trial.library.precision(trial.case.dtype):
        return empty_cache(trial), [step.new | step.masks for step in steps(trial, ends)]
