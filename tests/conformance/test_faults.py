"""The suite on planted faults: level full detects all of them, level smoke most."""

import io
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console

from precondattn_conformance.faults.catalogue import MINIMUM, OF_EACH_STAGE, faults, subjects
from precondattn_conformance.faults.fault import FORWARD, Fault
from precondattn_conformance.faults.selftest import (
    SMOKE,
    SMOKE_SHARE,
    FaultVerdict,
    SelfTest,
    missing_faults,
    planting,
    run_fault,
    run_self_test,
    show,
)


def kind(fault):
    """A key that is equal for faults that differ only in the mechanism or the method's result."""
    if not fault.operator:
        return fault.name
    if fault.operator == "result":
        return fault.operator, fault.detail
    return fault.carrier, fault.operator, fault.stages


def of_each_kind():
    """The first fault of each kind, on a simple mechanism if possible."""
    first = {}
    for fault in faults():
        first.setdefault(kind(fault), fault)
    return [*first.values()]


def groups(chosen, number):
    """Groups of mechanisms with about equal numbers of faults, to divide among workers."""
    count = Counter(fault.mechanism for fault in chosen)
    filled = [0] * number
    group_of = {}
    for mechanism, size in count.most_common():
        group_of[mechanism] = smallest = filled.index(min(filled))
        filled[smallest] += size
    actual = [[] for _ in range(number)]
    for fault in chosen:
        actual[group_of[fault.mechanism]].append(fault)
    return actual


QUICK = {
    "softmax, forward of blocks: the maximum over a row's first keys as that of the whole row",
    "softmax, forward+backward of leaves: the key mask of the first 64 keys only",
    "lucid_solve, step of leaves: v kept in place of y",
    "retention, step of leaves: a sequence without new tokens decays",
    "softmax, forward+backward of leaves: the output of the last forward of these shapes",
}
"""Faults of a range, a mask, a cache, a ragged batch, and a second call."""


def quick():
    """One fault of each operator, and a few faults written by hand."""
    of_operators = {fault.operator: fault for fault in reversed(of_each_kind()) if fault.operator}
    by_hand = [fault for fault in of_each_kind() if fault.name in QUICK]
    assert len(by_hand) == len(QUICK)
    return [*of_operators.values(), *by_hand]


def test_smoke_detects_a_fault_of_each_operator():
    with planting() as carriers:
        verdicts = [run_fault(carriers[fault.carrier], fault, SMOKE) for fault in quick()]
    assert not [verdict.fault for verdict in verdicts if not verdict.is_caught]


def all_are_detected(chosen):
    """Assert that all are detected, most by smoke, and that carriers without a fault pass."""
    actual = run_self_test(only=chosen, workers=1)
    assert not [verdict.fault for verdict in actual.survivors]
    assert not actual.failing_carriers
    assert actual.smoke_share >= SMOKE_SHARE


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(4))
def test_full_detects_a_fault_of_each_kind_and_smoke_most(number):
    all_are_detected(groups(of_each_kind(), 4)[number])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_full_detects_all_faults_and_smoke_most(number):
    all_are_detected(groups(faults(), 8)[number])


def test_every_mechanism_has_faults_in_every_method_that_it_has():
    assert not missing_faults()
    assert len(faults()) >= MINIMUM
    assert OF_EACH_STAGE >= 2
    assert {"forward", "backward", "step"} <= set(subjects()["lucid"])
    assert "step_backward" in subjects()["gated_delta"]
    assert "step" not in subjects()["softmax"] or "step_backward" not in subjects()["softmax"]


def planted(change, stage=FORWARD):
    return Fault("softmax", "softmax", (stage,), "leaves", "", "tried", change)


def tried(fault):
    with planting() as carriers:
        return run_fault(carriers[fault.carrier], fault, SMOKE)


def test_a_fault_without_effect_is_reported_as_undetected():
    verdict = tried(planted(lambda truth, call: truth(call)))
    assert not verdict.is_caught
    assert not verdict.broken
    assert verdict.changed == 0
    console = Console(file=io.StringIO(), width=200)
    assert show(SelfTest(SMOKE, [verdict]), console) == 1
    printed = console.file.getvalue()
    assert "1 faults, 0 caught" in printed
    assert "survived softmax, forward of leaves: tried" in printed
    assert "0 results of smoke were wrong" in printed


def test_an_undetected_change_is_distinguished_from_no_change():
    def rounded_otherwise(truth, call):
        result = truth(call)
        return replace(result, out=result.out * (1 + 1e-15))

    verdict = tried(planted(rounded_otherwise))
    assert not verdict.is_caught
    assert verdict.changed > 0


def test_a_fault_that_raises_an_error_does_not_count_as_detected():
    verdict = tried(planted(lambda truth, call: truth(call).nothing))
    assert not verdict.is_caught
    assert "nothing" in verdict.broken


def test_a_fault_that_never_runs_does_not_count_as_detected():
    verdict = tried(planted(lambda truth, call: truth(call), stage="step_backward"))
    assert not verdict.is_caught
    assert verdict.broken == "never reached"


def test_the_exit_code_is_0_only_if_all_faults_are_detected():
    good = SelfTest(SMOKE, [FaultVerdict("one", SMOKE)])
    console = Console(file=io.StringIO())
    assert show(good, console) == 0
    assert "smoke caught 100.0 %" in console.file.getvalue()
    assert show(SelfTest(SMOKE, [FaultVerdict("one", "full")]), console) == 1
