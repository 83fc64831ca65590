"""The source of expected results of long cases, which the record names."""

import numpy as np
import pytest

from precondattn_conformance import expecting
from precondattn_conformance.cases import case_of
from precondattn_conformance.expecting import expected_by, is_certified, shortened
from precondattn_conformance.oracle import oracle
from precondattn_conformance.report.result import Result
from precondattn_conformance.runner import run_case
from precondattn_conformance.status import PASSED
from precondattn_portable.backend import AlgorithmRunner

LONG = "b1t1025s1025h1n1d16e16block64.segments_long"


def case(layout=LONG, check="outputs", mechanism="gated_delta"):
    return case_of(f"{check}-numpy-float32-{layout}-clustered-{mechanism}")


@pytest.mark.parametrize(
    ("backend", "layout", "check", "by"),
    [
        ("triton", LONG, "outputs", "portable"),
        (("triton", "reference"), LONG, "gradients", "portable"),
        ("reference", LONG, "outputs", "portable"),
        # Backends with the same algorithms, and the default choice, which may be one of them.
        ("portable", LONG, "outputs", "reference"),
        ("torch", LONG, "outputs", "reference"),
        (None, LONG, "outputs", "reference"),
        ("triton", "b1t261s261h1n1d16e16block64", "outputs", "reference"),
        # This check computes its expectation itself.
        ("triton", "b1t1025s1025h1n1d16e16block64", "states", "reference"),
    ],
)
def test_the_blocked_algorithms_compute_long_cases_of_backends_with_others(
    backend, layout, check, by
):
    assert expected_by(case(layout, check), backend) == by


def test_the_certifying_call_is_the_same_but_for_its_length():
    layout = shortened(case("b1t960s1025h4n2d16e16block128.key_blocks").layout)
    assert layout.name == "b1t132s197h4n2d16e16block128.key_blocks"
    assert shortened(case("b1t1s1025h4n2d16e16block64").layout).t == 1


@pytest.fixture
def fresh():
    is_certified.cache_clear()
    yield
    is_certified.cache_clear()


def test_algorithms_that_are_wrong_at_a_small_size_compute_nothing(monkeypatch, fresh):
    right = AlgorithmRunner.backward

    def wrong(*arguments):
        gradients = right(*arguments)
        return {**gradients, "v": 1.001 * gradients["v"]}

    monkeypatch.setattr(AlgorithmRunner, "backward", wrong)
    assert expected_by(case(), "triton") == "reference"


def test_both_give_the_same_at_full_length():
    long = case(mechanism="lucid")
    arguments = (long.mechanism, long.layout, long.kind, long.dtype)
    by_reference, blocked = oracle(*arguments), oracle(*arguments, expecting.BLOCKED)
    np.testing.assert_allclose(blocked.out, by_reference.out, atol=1e-12)
    for name, gradient in by_reference.gradients.items():
        np.testing.assert_allclose(blocked.gradients[name], gradient, atol=1e-10)


def test_the_record_names_who_computed_what_was_expected():
    outcome = run_case(case(), "reference")
    assert outcome.status == PASSED, outcome.text
    entry = Result.of_outcome(outcome).to_json()
    assert entry["expected_by"] == "portable"
    assert Result.from_json(entry).expected_by == "portable"
    short = run_case(case("b1t17s17h1n1d16e16block16"), "reference")
    assert "expected_by" not in Result.of_outcome(short).to_json()
