"""Planted faults: level full detects all, level smoke most, each in the checks of its kind."""

import io
from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest
from rich.console import Console

from precondattn.cache.capacity import grown
from precondattn.cache.kept import states_at
from precondattn.cache.sequences import reorder
from precondattn_conformance.cases import case_of
from precondattn_conformance.faults.catalogue import OF_EACH_STAGE, faults, subjects
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
from precondattn_conformance.runner import run_case
from precondattn_conformance.status import FAILED


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


QUICK = {
    "softmax, forward of blocks: the maximum over a row's first keys as that of the whole row",
    "softmax, forward+backward of leaves: the key mask of the first 64 keys only",
    "lucid_solve, step of leaves: v kept in place of y",
    "retention, step of leaves: a sequence without new tokens decays",
    "softmax, forward+backward of leaves: the output of the last forward of these shapes",
}
"""Faults of a range, a mask, a cache, a ragged batch, and a second call."""


def test_smoke_detects_a_fault_of_each_operator():
    of_operators = {fault.operator: fault for fault in reversed(of_each_kind()) if fault.operator}
    by_hand = [fault for fault in of_each_kind() if fault.name in QUICK]
    assert len(by_hand) == len(QUICK)
    with planting() as carriers:
        verdicts = [
            run_fault(carriers[fault.carrier], fault, SMOKE)
            for fault in (*of_operators.values(), *by_hand)
        ]
    assert not [verdict.fault for verdict in verdicts if not verdict.is_caught]


def all_are_detected(chosen, number, groups):
    """All faults of a group of mechanisms are, most by smoke; carriers without a fault pass."""
    chosen = [fault for fault in chosen if crc32(fault.mechanism.encode()) % groups == number]
    actual = run_self_test(only=chosen, workers=1)
    assert not [verdict.fault for verdict in actual.survivors]
    assert not actual.failing_carriers
    assert actual.smoke_share >= SMOKE_SHARE


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(4))
def test_full_detects_a_fault_of_each_kind_and_smoke_most(number):
    all_are_detected(of_each_kind(), number, 4)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_full_detects_all_faults_and_smoke_most(number):
    all_are_detected(faults(), number, 8)


def test_every_mechanism_has_faults_in_every_method_that_it_has():
    assert not missing_faults()
    assert OF_EACH_STAGE >= 2
    assert {"forward", "backward", "step"} <= set(subjects()["lucid"])
    assert "step_backward" in subjects()["gated_delta"]


@pytest.mark.parametrize(
    ("change", "stage", "broken"),
    [
        (lambda result: result, FORWARD, ""),
        (lambda result: replace(result, out=result.out * (1 + 1e-15)), FORWARD, ""),
        (lambda result: result.nothing, FORWARD, "nothing"),
        (lambda result: result, "step_backward", "never reached"),
    ],
    ids=["no effect", "rounded otherwise", "raises an error", "never runs"],
)
def test_what_is_no_detected_fault_does_not_count_as_one(change, stage, broken):
    def planted(truth, call):
        return change(truth(call))

    fault = Fault("softmax", "softmax", (stage,), "leaves", "", "tried", planted)
    with planting() as carriers:
        verdict = run_fault(carriers["leaves"], fault, SMOKE)
    assert not verdict.is_caught
    assert broken in verdict.broken if broken else not verdict.broken
    assert show(SelfTest([FaultVerdict("one", SMOKE)]), Console(file=io.StringIO())) == 0
    console = Console(file=io.StringIO(), width=200)
    assert show(SelfTest([verdict]), console) == 1
    printed = console.file.getvalue()
    assert "1 faults, 0 caught" in printed
    assert f"survived softmax, {stage} of leaves: tried" in printed


def unused_rows_first(cache, capacity):
    larger = grown(cache, capacity)
    store = {
        name: np.roll(buffer, capacity - cache.store[name].shape[1], axis=1)
        for name, buffer in larger.store.items()
    }
    return larger._replace(store=store)


BROKEN_OPERATIONS = {
    "crop leaves the cache as it is": ("cache.crop", "lucid", lambda cache, *_, **__: cache),
    "grow puts unused rows first": ("capacity.grown", "lucid", unused_rows_first),
    "rewritten rows are cropped": ("cache.fixed_buffers", "path", lambda cache: []),
    "restore keeps the states": (
        "cache.restore",
        "gla",
        lambda cache, earlier, *, donate: cache._replace(length=earlier.length),
    ),
    "crop restores a state one token late": (
        "crop.states_at",
        "gla",
        lambda cache, length: states_at(cache, length + 1),
    ),
    "crop restores the states of another sequence": (
        "crop.states_at",
        "gla",
        lambda cache, length: {n: a[::-1] for n, a in states_at(cache, length).items()},
    ),
    "reorder keeps the order": (
        "sequences.reorder",
        "gla",
        lambda cache, indices, verb="": reorder(cache, sorted(indices), verb),
    ),
}


@pytest.mark.parametrize("name", BROKEN_OPERATIONS)
def test_a_broken_operation_on_caches_is_detected(monkeypatch, name):
    place, expression, broken = BROKEN_OPERATIONS[name]
    case = case_of(f"cache_operations-numpy-float64-plain-clustered-{expression}")
    assert run_case(case, "reference").status == "passed"
    monkeypatch.setattr(f"precondattn.cache.{place}", broken)
    assert run_case(case, "reference").status == FAILED
