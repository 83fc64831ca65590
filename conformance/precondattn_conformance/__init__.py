"""The conformance suite: it compares any backend, third-party ones included, with the oracle.

    precondattn conformance --backend NAME --level smoke
    pytest --pyargs precondattn_conformance --precondattn-backend NAME

Both run the same cases (`cases.py`), which are generated from the mechanisms' declarations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import precondattn as pa
    from precondattn_conformance.checks import Backend

# Every pytest run imports this package for its plugin, so the functions import what they need.


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
        return f"{outcome.status}: {outcome.text}"
    measured = outcome.measured
    return f"{outcome.status}: error {measured.error:.3g}, bound {measured.bound:.1g}"


def call_of(case: str, device: str | None = None) -> tuple[pa.Mechanism, dict[str, Any]]:
    """The mechanism of a case, given by its id, and the inputs and masks of its call.

    Examples
    --------
    >>> mechanism, inputs = call_of("outputs-numpy-float64-plain-clustered-lucid")
    >>> mechanism(**inputs, backend="reference").shape
    (2, 7, 4, 6)
    """
    from precondattn_conformance.snippet import call_of

    return call_of(case, device)
