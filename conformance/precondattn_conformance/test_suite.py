"""The cases as pytest tests. `plugin.py` has the flags that select them."""

from collections.abc import Callable, Iterator

import pytest

from precondattn_conformance.case import Case
from precondattn_conformance.runner import Outcome
from precondattn_conformance.status import FAILED, SKIPPED, UNSUPPORTED, XFAILED


@pytest.fixture(scope="session")
def precondattn_run(request: pytest.FixtureRequest) -> Iterator[Callable[[Case], Outcome]]:
    plugin = request.config.pluginmanager.get_plugin("precondattn-run")
    assert plugin is not None
    with plugin.runner() as run:
        yield run


def test_conformance(
    precondattn_case: Case,
    precondattn_run: Callable[[Case], Outcome],
    request: pytest.FixtureRequest,
) -> None:
    outcome = precondattn_run(precondattn_case)
    request.node.precondattn_outcome = outcome
    if outcome.status in (UNSUPPORTED, SKIPPED):
        pytest.skip(outcome.reason)
    if outcome.status == XFAILED:
        pytest.xfail(outcome.reason)
    if outcome.status == FAILED:
        pytest.fail(outcome.text, pytrace=False)
