"""The code that a failure prints: run as a script it fails in the same way, and without the fault
it passes. One planted fault for each check.
"""

import contextlib
import io
import re
import threading
from dataclasses import replace

import numpy as np
import pytest

import precondattn as pa
from precondattn.arrays import namespace, upcast_all
from precondattn_conformance.cases import case_of
from precondattn_conformance.checks import CHECKS, memory
from precondattn_conformance.faults.carriers import Leaves
from precondattn_conformance.faults.fault import BACKWARD, FORWARD, STAGES, STEP, Fault
from precondattn_conformance.runner import run_case
from precondattn_conformance.status import FAILED


def output(change, when=lambda call: True):
    """A fault that changes outputs of some calls."""

    def planted(truth, call):
        result = truth(call)
        return replace(result, out=change(result.out)) if when(call) else result

    return planted


def gradient(change):
    """A fault that changes the gradient of k."""

    def planted(truth, call):
        result = truth(call)
        return replace(result, gradients={**result.gradients, "k": change(result.gradients["k"])})

    return planted


def too_large(out):
    return 1.5 * out


def elsewhere(call):
    return threading.current_thread() is not threading.main_thread()


def one_ulp_off():
    """One element of every fifth output differs in its last bit, as after a rare race."""
    calls = []

    def change(out):
        calls.append(1)
        out = out + 0
        if len(calls) % 5 == 0:
            out[0, 0, 0, 0] = np.nextafter(out[0, 0, 0, 0], np.inf)
        return out

    return output(change)


def residuals_by_shape():
    """A workspace for each shape, which later calls overwrite."""
    kept = {}

    def planted(truth, call):
        if call.stage == FORWARD:
            kept[call.inputs["q"].shape] = call
            return truth(call)
        last = kept[call.inputs["q"].shape]
        return truth(replace(call, inputs=last.inputs))

    return planted


def all_arrays_kept():
    kept = []

    def change(out):
        kept.append(out + 0)
        return out

    return output(change)


def buffer_written(truth, call):
    result = truth(call)
    for buffer in call.past.values():
        buffer[...] *= 0.5
    return result


def dense(truth, call):
    q = call.inputs["q"]
    q = q if q.flags.c_contiguous else np.ravel(q, order="K").reshape(q.shape)
    return truth(call.with_inputs(q=q))


def of_its_parent(truth, call):
    return truth(replace(call, mechanism=pa.Softmax()))


def nan_spread(truth, call):
    """A sum over all sequences, times 0."""
    v = call.inputs["v"]
    result = truth(call)
    return replace(result, out=result.out + 0 * namespace(v).sum(v, axis=0)[:, :1, :1])


PLAIN = "plain-clustered-softmax"
PLANTED = {
    "outputs": (f"numpy-float64-{PLAIN}", (FORWARD,), output(too_large)),
    "gradients": (f"numpy-float64-{PLAIN}", (BACKWARD,), gradient(too_large)),
    "caching": (f"torch-float32-{PLAIN}", (STEP,), output(too_large)),
    "splits": (f"numpy-float64-{PLAIN}", (STEP,), output(too_large)),
    "alternation": ("numpy-float64-ragged-clustered-softmax", (STEP,), output(too_large)),
    "cache_operations": ("numpy-float64-ragged-clustered-softmax", (STEP,), output(too_large)),
    "states": ("numpy-float64-plain-clustered-gated_delta", STAGES[2:], output(too_large)),
    "packing": (
        "torch-float32-packed-zero-softmax",
        (FORWARD,),
        output(too_large, lambda call: call.frame.k_segment is not None),
    ),
    "padding": ("numpy-float64-ragged-clustered-softmax", (FORWARD,), output(too_large)),
    "future": (f"numpy-float32-{PLAIN}", (FORWARD,), nan_spread),
    "stability": ("numpy-float64-plain-huge_logits-softmax", (FORWARD,), output(too_large)),
    "dtypes": ("numpy-float64-plain-random-softmax", (FORWARD,), output(too_large)),
    "determinism": (f"numpy-float64-{PLAIN}", (FORWARD,), one_ulp_off()),
    "order_of_calls": (f"torch-float64-{PLAIN}", (FORWARD, BACKWARD), residuals_by_shape()),
    "purity": (f"numpy-float64-{PLAIN}", (STEP,), buffer_written),
    "strides": (f"numpy-float64-{PLAIN}", (FORWARD,), dense),
    "refusals": ("numpy-float64-plain-random-softmax", (FORWARD, BACKWARD), of_its_parent),
    "transforms": (f"torch-float64-{PLAIN}", (FORWARD,), output(too_large)),
    "dynamic_shapes": (
        f"torch-float32-{PLAIN}",
        (FORWARD,),
        output(too_large, lambda call: call.inputs["q"].shape[0] == 3),
    ),
    "autocast": (f"torch-bfloat16-{PLAIN}", (FORWARD,), output(too_large)),
    "threads": (
        "numpy-float32-threads-clustered-softmax",
        (FORWARD,),
        output(too_large, elsewhere),
    ),
    "leaks": ("numpy-float32-leak-random-softmax", (FORWARD,), all_arrays_kept()),
}
"""For each check: the rest of a case's id, the methods, and the fault."""
ELSEWHERE = {"sharding", "memory"}
"""Checks that need four devices (`on_four_devices_the_check.py`), or minutes (below)."""


def printed(snippet):
    """The output of a failure's code as a script, and whether it ended in an AssertionError."""
    console, failed = io.StringIO(), False
    with contextlib.redirect_stdout(console):
        try:
            exec(compile(snippet, "snippet.py", "exec"), {"__name__": "__main__"})
        except AssertionError:
            failed = True
    return console.getvalue(), failed


class TraceableDefinition(Leaves):
    """The definition of a leaf, which PyTorch's compiler can trace."""

    def residual_shapes(self, mechanism, inputs, frame):
        return ()

    def forward(self, mechanism, inputs, frame):
        return super().forward(mechanism, inputs, frame)[0], ()

    def backward(self, mechanism, inputs, frame, out, residuals, cotangent):
        out, residuals = mechanism.forward(upcast_all(inputs), frame)
        return super().backward(mechanism, inputs, frame, out, residuals, cotangent)


@pytest.fixture
def carrier():
    carrier = TraceableDefinition()
    pa.register_backend(carrier)
    yield carrier
    pa.unregister_backend(carrier.name)


def test_there_is_a_fault_for_each_check():
    assert PLANTED.keys() | ELSEWHERE == set(CHECKS)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=pytest.mark.thorough if check == "leaks" else ())
        for check in PLANTED
    ],
)
def test_the_code_of_a_failure_reproduces_it_and_passes_without_the_fault(carrier, check):
    rest, stages, change = PLANTED[check]
    case = case_of(f"{check}-{rest}")
    fault = Fault("softmax", case.mechanism, stages, "leaves", "", "planted", change)
    carrier.carry(fault)
    outcome = run_case(case, carrier.name)
    assert outcome.status == FAILED
    text, failed = printed(outcome.snippet)
    assert failed, text
    kind, _, _ = outcome.reason.partition(" is off by")
    assert text.startswith(f"failed: {kind[:30]}"), outcome.reason
    carrier.carry(None)
    text, failed = printed(outcome.snippet)
    assert not failed, text
    assert text.startswith("passed")


def option_ignored():
    """All later calls with these shapes use the options of the first call."""
    first = {}

    def planted(truth, call):
        mechanism = first.setdefault(call.inputs["q"].shape, call.mechanism)
        return truth(replace(call, mechanism=mechanism))

    return planted


def option_kept():
    """A call without options uses those of the first call that had some."""
    kept = []

    def planted(truth, call):
        if call.mechanism != pa.Softmax():
            kept.append(call.mechanism)
            return truth(call)
        return truth(replace(call, mechanism=(kept or [call.mechanism])[0]))

    return planted


@pytest.mark.parametrize("fault", [option_ignored, option_kept])
def test_the_code_of_a_failure_with_options_calls_them_in_turn(carrier, fault):
    def carry():
        carrier.carry(Fault("softmax", "softmax", (FORWARD,), "leaves", "", "planted", fault()))

    carry()
    outcome = run_case(
        case_of("order_of_calls-numpy-float64-plain-clustered-softmax"), carrier.name
    )
    assert outcome.status == FAILED
    numbers = re.search(r": (\S+) found, (\S+) expected", outcome.reason).groups()
    carry()
    text, failed = printed(outcome.snippet)
    assert failed
    shown = [float(number) for number in text.splitlines()[-1].split()]
    np.testing.assert_allclose(shown, [float(number) for number in numbers], rtol=1e-6)
    carry()
    only_written_out = re.sub("outcome = replay.*", "outcome = ''", outcome.snippet)
    text, _ = printed(only_written_out)
    shown = [float(number) for number in text.splitlines()[-1].split()]
    np.testing.assert_allclose(shown, [float(number) for number in numbers], rtol=1e-6)


def test_the_code_of_a_memory_failure_reproduces_it(carrier, monkeypatch):
    carrier.memory = "linear"
    monkeypatch.setattr(memory, "peak_bytes", lambda call: float(call.layout.t**2))
    outcome = run_case(case_of("memory-numpy-float32-long-random-linear"), carrier.name)
    assert outcome.status == FAILED
    text, failed = printed(outcome.snippet)
    assert failed
    assert "declares linear memory" in text
    carrier.memory = "quadratic"
    text, failed = printed(outcome.snippet)
    assert not failed, text
