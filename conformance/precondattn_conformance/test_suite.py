"""The cases as tests. See `plugin.py` for the flags that choose them."""

import pytest

from precondattn_conformance.case import Case
from precondattn_conformance.runner import FAILED, UNSUPPORTED, run_case


def test_conformance(precondattn_case: Case, request: pytest.FixtureRequest) -> None:
    backend = tuple(request.config.getoption("precondattn_backend")) or None
    device = request.config.getoption("precondattn_device")
    outcome = run_case(precondattn_case, backend, device)
    if outcome.status == UNSUPPORTED:
        pytest.skip(outcome.reason)
    if outcome.status == FAILED:
        pytest.fail(outcome.reason, pytrace=False)
