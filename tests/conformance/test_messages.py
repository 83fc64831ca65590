"""Messages of failures, as the author of a kernel or mechanism sees them."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.cases import case_of
from precondattn_conformance.checks import leaks
from precondattn_conformance.faults.carriers import Leaves
from precondattn_conformance.faults.fault import BACKWARD, FORWARD, STEP, Fault
from precondattn_conformance.runner import run_case
from precondattn_conformance.status import FAILED, PASSED

PLAIN = "numpy-float64-plain-clustered-softmax"


@pytest.fixture
def carrier():
    carrier = Leaves()
    pa.register_backend(carrier)
    yield carrier
    pa.unregister_backend(carrier.name)


@pytest.fixture
def reason(carrier):
    """A function that returns the message of a case for a fault of softmax."""

    def of(case, change, *stages):
        carrier.carry(Fault("softmax", "softmax", stages or (FORWARD,), "leaves", "", "", change))
        outcome = run_case(case_of(case), carrier.name)
        assert outcome.status == FAILED
        return outcome.reason

    return of


def one_off(index, share):
    """A fault of one element of the output."""

    def planted(truth, call):
        out = truth(call).out + 0
        out[index] += share * np.max(np.abs(out))
        return replace(truth(call), out=out)

    return planted


def in_the_last_bit(every):
    """A race: in every n-th call an element differs in its last bit."""
    calls = []

    def planted(truth, call):
        calls.append(1)
        result = truth(call)
        if len(calls) % every:
            return result
        out = result.out + 0
        out[0, 1, 2, 3] = np.nextafter(out[0, 1, 2, 3], np.inf)
        return replace(result, out=out)

    return planted


@pytest.mark.parametrize("every", [2, 3, 5, 7])
def test_a_race_in_the_last_bit_is_not_deterministic(reason, every):
    text = reason(f"determinism-{PLAIN}", in_the_last_bit(every))
    assert text.startswith("the output is not deterministic: call ")
    assert "1 of 336 elements differ, most at b=0, t=1, h=2, e=3: " in text
    found, _, before = text.rpartition("e=3: ")[2].partition(" in call")
    assert float(found) != float(before.rpartition(", ")[2].partition(" in")[0])


def test_residuals_that_a_pullback_spends_are_named(reason):
    spent = []

    def planted(truth, call):
        if call.stage == FORWARD:
            spent.clear()
            return truth(call)
        result = truth(call)
        spent.append(1)
        k = result.gradients["k"] / len(spent)
        return replace(result, gradients={**result.gradients, "k": k})

    text = reason(f"determinism-{PLAIN}", planted, FORWARD, BACKWARD)
    assert text.startswith("the gradient of k differs when the same pullback is called again")


def test_a_wrong_element_of_a_large_output_is_no_leak(reason):
    assert case_of("outputs-numpy-float32-leak-random-softmax").layout.sizes["t"] == 64
    text = reason("leaks-numpy-float32-leak-random-softmax", one_off((3, 60, 5, 7), 0.01))
    assert text.startswith("no leak, but a wrong result: the output is off by 0.01")
    assert "worst at b=3, t=60, h=5, e=7: " in text
    text = reason("outputs-numpy-float32-leak-random-softmax", one_off((3, 60, 5, 7), 0.01))
    assert text.startswith("the output is off by 0.01")


def test_a_leak_says_how_much_each_call_keeps(reason, monkeypatch):
    grown = iter(range(0, 10**10, 10**9))
    monkeypatch.setattr(leaks, "held_bytes", lambda library: next(grown))
    text = reason("leaks-numpy-float32-leak-random-softmax", lambda truth, call: truth(call))
    assert text.startswith("each call keeps 119.2 MiB after its results were released")


def of_parent(truth, call):
    return truth(replace(call, mechanism=pa.Softmax()))


def with_parents_gradient(truth, call):
    return of_parent(truth, call) if call.stage == BACKWARD else truth(call)


def raising(truth, call):
    if type(call.mechanism) is not pa.Softmax:
        raise KeyError("no kernel")
    return truth(call)


@pytest.mark.parametrize(
    ("change", "stages", "text"),
    [
        (of_parent, (FORWARD, BACKWARD), "takes a derived leaf (a class derived from Softmax"),
        (with_parents_gradient, (FORWARD, BACKWARD), "is wrong on a derived leaf (a class"),
        (raising, (FORWARD,), "claims a derived leaf (a class derived from Softmax"),
    ],
)
def test_a_leaf_that_is_taken_for_its_parent_is_told_from_one_that_is_not_known(
    reason, change, stages, text
):
    found = reason("refusals-numpy-float64-plain-random-softmax", change, *stages)
    assert text in found
    assert "Decline it: decide by `type(mechanism) is` or `==`" in found
    if change is of_parent:
        assert "for Softmax itself: the output is that of Softmax." in found


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("backend", ["reference", "torch", "portable"])
def test_a_derived_leaf_that_runs_its_own_mathematics_is_right(library, backend):
    pytest.importorskip(library)
    pytest.importorskip("torch")
    if (library, backend) in (("numpy", "torch"), ("torch", "portable")):
        pytest.skip(f"{backend} does not compute {library} arrays")
    outcome = run_case(case_of(f"refusals-{library}-float64-plain-random-softmax"), backend)
    assert outcome.status == PASSED, outcome.reason


def test_a_consequence_of_a_wrong_plain_call_says_so(reason):
    text = reason(f"strides-{PLAIN}", one_off((0, 0, 0, 0), 1.0))
    assert text.endswith("; the plain call is wrong too: look at `outputs` first")
    text = reason(f"caching-{PLAIN}", one_off((0, 0, 0, 0), 1.0), STEP)
    assert "the plain call" not in text


@pytest.mark.parametrize("option", ["scale", "eps"])
def test_an_ignored_option_of_a_piece_is_named(carrier, option):
    def planted(truth, call):
        default = type(call.mechanism).__dataclass_fields__[option].default
        return truth(replace(call, mechanism=replace(call.mechanism, **{option: default})))

    case = case_of("order_of_calls-numpy-float64-plain-clustered-lucid_solve")
    carrier.carry(Fault("lucid_solve", "lucid_solve", (FORWARD,), "leaves", "", "", planted))
    outcome = run_case(case, carrier.name)
    assert outcome.status == FAILED
    assert outcome.reason.startswith(f"the output of lucid_solve[{option}=")
    assert outcome.reason.endswith(
        "either the option is ignored, or something is kept by shapes alone"
    )


def test_an_array_that_was_written_to_is_shown_before_and_after(reason):
    def planted(truth, call):
        result = truth(call)
        call.inputs["q"][0, 0, 0, 0] = 7.0
        return result

    text = reason(f"outputs-{PLAIN}", planted)
    assert text.startswith("the input q was written to; a call may not change it; 1 of 448")
    assert "b=0, t=0, h=0, d=0: 7 after the call, " in text


@pytest.fixture
def unfinished():
    """A mechanism whose gradient is half of what it should be, and which has no `step`."""

    @dataclass(frozen=True)
    class Unfinished(pa.Leaf):
        name: ClassVar[str] = "unfinished"
        inputs = pa.Inputs(v="b s n e")
        output = "b s n e"

        def forward(self, x, frame):
            return 2 * x["v"], ()

        def backward(self, x, frame, out, residuals, cotangent):
            return {"v": cotangent}

    yield "unfinished"
    pa.unregister_mechanism("unfinished")


def test_a_definition_whose_gradient_is_wrong_is_told_from_a_wrong_backend(unfinished):
    outcome = run_case(case_of(f"outputs-numpy-float64-plain-random-{unfinished}"), "reference")
    assert outcome.status == FAILED
    assert outcome.reason.startswith("the definition of unfinished contradicts itself")
    assert "by its `backward`, and" in outcome.reason


def test_a_method_that_a_leaf_lacks_is_named(unfinished):
    leaf, v = pa.parse(unfinished), np.ones((1, 3, 1, 2))
    with pytest.raises(
        NotImplementedError, match=r"Unfinished .* no method `step`, which `extend`"
    ):
        leaf.extend(leaf.init_cache(v, capacity=3), v)
