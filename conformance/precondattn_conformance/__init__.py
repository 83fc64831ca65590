"""The conformance suite, which compares any backend, third-party ones included, with the oracle.

    precondattn conformance --backend NAME --level smoke
    pytest --pyargs precondattn_conformance --precondattn-backend NAME
    check(function, "kda")

All run the same cases (`cases.py`), which are generated from the mechanisms' declarations.
`benchmark_cases` gives a test of pytest-benchmark calls to time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import precondattn as pa
    from precondattn.arrays import Arrays
    from precondattn_conformance.bench.benchmark_cases import benchmark_cases
    from precondattn_conformance.check_function import CheckResult, check
    from precondattn_conformance.checks.check import Backend
    from precondattn_conformance.functions.backend import backend_from_function
    from precondattn_conformance.oracle import Oracle

__all__ = [
    "CheckResult",
    "backend_from_function",
    "benchmark_cases",
    "cache_of",
    "call_of",
    "check",
    "expected_of",
    "replay",
]

# Every pytest run imports this package for its plugin, so the functions import what they need.


def __getattr__(name: str) -> object:
    if name in ("check", "CheckResult"):
        from precondattn_conformance import check_function

        return getattr(check_function, name)
    if name == "backend_from_function":
        from precondattn_conformance.functions.backend import backend_from_function

        return backend_from_function
    if name == "benchmark_cases":
        from precondattn_conformance.bench.benchmark_cases import benchmark_cases

        return benchmark_cases
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def replay(case: str, backend: Backend = None, device: str | None = None) -> str:
    """Run a case by its id, and return its outcome as text.

    Examples
    --------
    >>> replay("outputs-numpy-float64-plain-clustered-lucid", backend="reference").split(":")[0]
    'passed'
    """
    from precondattn_conformance.cases import case_of
    from precondattn_conformance.runner import run_case

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
    from precondattn_conformance import of_case

    return of_case.call_of(case, device, turned=turned)


def expected_of(case: str, device: str | None = None) -> Oracle:
    """The oracle's results for the call of a case: `out`, `cotangent` and `gradients`.

    They are arrays of the case's library, on the device; the output and the gradients are in
    float64.

    Examples
    --------
    >>> expected = expected_of("gradients-numpy-float32-plain-clustered-lucid")
    >>> expected.gradients["k"].shape, expected.gradients["k"].dtype
    ((2, 7, 2, 8), dtype('float64'))
    """
    from precondattn_conformance import of_case

    return of_case.expected_of(case, device)


def cache_of(case: str, device: str | None = None) -> tuple[pa.Cache, list[Arrays]]:
    """The empty cache of a case and, for each call of `extend`, the new tokens and their masks.

    Examples
    --------
    >>> cache, steps = cache_of("caching-numpy-float64-plain-clustered-lucid")
    >>> [new["q"].shape[1] for new in steps]
    [1, 2, 1, 1, 2]
    """
    from precondattn_conformance import of_case

    return of_case.cache_of(case, device)
