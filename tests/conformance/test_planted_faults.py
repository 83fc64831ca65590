"""A planted fault fails in the check of its kind, with a message that names it, and with code that
fails in the same way as a script, and passes without the fault.
"""

import contextlib
import io
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import pytest

import precondattn as pa
from precondattn.arrays import namespace, upcast_all
from precondattn_conformance.cases import case_of
from precondattn_conformance.checks import CHECKS, memory
from precondattn_conformance.checks.determinism import REPEATS
from precondattn_conformance.faults.carriers import Leaves
from precondattn_conformance.faults.fault import BACKWARD, FORWARD, STEP, Fault
from precondattn_conformance.runner import run_case
from precondattn_conformance.status import FAILED

# Changes of calls and results. Each function returns a new change, which has its own state.


def output(change, when=lambda call: True):
    """Change outputs of some calls."""

    def planted(truth, call):
        result = truth(call)
        return replace(result, out=change(result.out)) if when(call) else result

    return planted


def too_large(when=lambda call: True):
    return lambda: output(lambda out: 1.5 * out, when)


def one_off(index, share):
    """One wrong element."""

    def change(out):
        out = out + 0
        out[index] += share * np.max(np.abs(out))
        return out

    return lambda: output(change)


def race(every):
    """In every n-th call, one element differs in its last bit."""

    def made():
        calls = []

        def change(out):
            calls.append(1)
            out = out + 0
            if len(calls) % every == 0:
                out[0, 1, 2, 3] = np.nextafter(out[0, 1, 2, 3], np.inf)
            return out

        return output(change)

    return made


def key_gradient(change):
    def planted(truth, call):
        result = truth(call)
        if call.stage != BACKWARD:
            return result
        return replace(result, gradients={**result.gradients, "k": change(result.gradients["k"])})

    return planted


def residuals_that_are_spent():
    calls = []

    def planted(truth, call):
        calls.append(1)
        if call.stage == FORWARD:
            calls.clear()
        return key_gradient(lambda d_k: d_k / len(calls))(truth, call)

    return planted


def residuals_by_shape():
    """A workspace for each shape, which later calls overwrite."""
    kept = {}

    def planted(truth, call):
        last = kept.get(call.inputs["q"].shape)
        if call.stage == FORWARD:
            last = kept[call.inputs["q"].shape] = call
        return truth(replace(call, inputs=last.inputs))

    return planted


def option_of_an_earlier_call():
    """A call without options uses those of the first call that had some."""
    kept = []

    def planted(truth, call):
        if call.mechanism != pa.Softmax():
            kept.append(call.mechanism)
            return truth(call)
        return truth(replace(call, mechanism=(kept or [call.mechanism])[0]))

    return planted


def default_of(option):
    def planted(truth, call):
        default = type(call.mechanism).__dataclass_fields__[option].default
        return truth(replace(call, mechanism=replace(call.mechanism, **{option: default})))

    return lambda: planted


def taken_for_its_parent(*stages):
    def planted(truth, call):
        is_wrong = call.stage in stages
        return truth(replace(call, mechanism=pa.Softmax()) if is_wrong else call)

    return lambda: planted


def raises_on_a_derived_leaf(truth, call):
    if type(call.mechanism) is not pa.Softmax:
        raise KeyError("no kernel")
    return truth(call)


def input_written(truth, call):
    result = truth(call)
    call.inputs["q"][0, 0, 0, 0] = 7.0
    return result


def buffer_written(truth, call):
    result = truth(call)
    for buffer in call.past.values():
        buffer[...] *= 0.5
    return result


def as_if_dense(truth, call):
    q = call.inputs["q"]
    q = q if q.flags.c_contiguous else np.ravel(q, order="K").reshape(q.shape)
    return truth(call.with_inputs(q=q))


def nan_of_all_sequences(truth, call):
    """A sum over all sequences, times 0."""
    v = call.inputs["v"]
    result = truth(call)
    return replace(result, out=result.out + 0 * namespace(v).sum(v, axis=0)[:, :1, :1])


HELD = [0]
"""The bytes that the planted leak keeps, which `held_bytes` reports in these tests."""


def leak():
    HELD[0] = 0

    def change(out):
        HELD[0] += 10**9
        return out

    return output(change)


class FoundFault(NamedTuple):
    case: str
    made: Callable
    says: str
    """A pattern of the message."""
    stages: tuple[str, ...] = (FORWARD,)

    @property
    def id(self):
        return f"{self.case.partition('-')[0]}-{getattr(self.made, '__name__', '')}"


BOTH = (FORWARD, BACKWARD)
PLAIN = "numpy-float64-plain-clustered-softmax"
RAGGED = "numpy-float64-ragged-clustered-softmax"
OPTIONS = "order_of_calls-numpy-float64-plain-clustered"
REFUSALS = "refusals-numpy-float64-plain-random-softmax"
LEAK = "numpy-float32-leak-random-softmax"
PLANTED = (
    FoundFault(f"outputs-{PLAIN}", too_large(), "^the output is off by 0.5"),
    FoundFault(
        f"outputs-{PLAIN}",
        lambda: input_written,
        "^the input q was written to; a call may not change it; 1 of 448.*"
        "b=0, t=0, h=0, d=0: 7 after the call, ",
    ),
    FoundFault(
        f"leaks-{LEAK}",
        one_off((3, 60, 5, 7), 0.01),
        "^no leak, but a wrong result: the output is off by 0.01.*worst at b=3, t=60, h=5, e=7: ",
    ),
    FoundFault(
        f"leaks-{LEAK}",
        leak,
        r"^each call keeps 9\d\d.\d MiB after its results were released",
    ),
    FoundFault(
        f"gradients-{PLAIN}",
        lambda: key_gradient(lambda d_k: 1.5 * d_k),
        "^vjp of k is off by 0.5",
        (BACKWARD,),
    ),
    # Only the step is wrong, so no plain call is mentioned.
    FoundFault(
        "caching-torch-float32-plain-clustered-softmax",
        too_large(),
        "^(?!.*the plain call).* is off by 0.5",
        (STEP,),
    ),
    FoundFault(f"splits-{PLAIN}", too_large(), "is off by 0.5", (STEP,)),
    FoundFault(f"alternation-{RAGGED}", too_large(), "is off by", (STEP,)),
    FoundFault(f"cache_operations-{RAGGED}", too_large(), "is off by", (STEP,)),
    FoundFault(
        "states-numpy-float64-plain-clustered-gated_delta", too_large(), "is off by 0.5", (STEP,)
    ),
    FoundFault(
        "packing-torch-float32-packed-zero-softmax",
        too_large(lambda call: call.frame.k_segment is not None),
        "is off by 0.5",
    ),
    FoundFault(f"padding-{RAGGED}", too_large(), "is off by 0.5"),
    FoundFault(
        "future-numpy-float32-plain-clustered-softmax",
        lambda: nan_of_all_sequences,
        "^the output elsewhere is off by nan",
    ),
    FoundFault(
        "stability-numpy-float64-plain-huge_logits-softmax",
        too_large(),
        "^the output is off by 0.5",
    ),
    FoundFault("dtypes-numpy-float64-plain-random-softmax", too_large(), "is off by 0.5"),
    *(
        FoundFault(
            f"determinism-{PLAIN}",
            race(every),
            rf"^the output is not deterministic: call {every} .*1 of 336 elements differ, most at "
            r"b=0, t=1, h=2, e=3: (\S+) in call \d+, (?!\1 )\S+ in call",
        )
        for every in (2, REPEATS + 1, 7)  # At once, at last, and by further repeats.
    ),
    FoundFault(
        f"determinism-{PLAIN}",
        residuals_that_are_spent,
        "^the gradient of k differs when the same pullback is called again",
        BOTH,
    ),
    FoundFault(
        "order_of_calls-torch-float64-plain-clustered-softmax",
        residuals_by_shape,
        "is off by",
        BOTH,
    ),
    FoundFault(f"{OPTIONS}-softmax", option_of_an_earlier_call, "is off by"),
    *(
        FoundFault(
            f"{OPTIONS}-lucid_solve",
            default_of(option),
            rf"^the output of lucid_solve\[{option}=.*"
            "either the option is ignored, or something is kept by shapes alone$",
        )
        for option in ("scale", "eps")
    ),
    FoundFault(f"purity-{PLAIN}", lambda: buffer_written, "was written to", (STEP,)),
    FoundFault(f"strides-{PLAIN}", lambda: as_if_dense, "^(?!.*the plain call).* is off by"),
    FoundFault(
        f"strides-{PLAIN}",
        one_off((0, 0, 0, 0), 1.0),
        "; the plain call is wrong too: look at `outputs` first$",
    ),
    FoundFault(
        REFUSALS,
        taken_for_its_parent(*BOTH),
        r"takes a derived leaf \(a class derived from Softmax.*"
        "for Softmax itself: the output is that of Softmax",
        BOTH,
    ),
    FoundFault(
        REFUSALS, taken_for_its_parent(BACKWARD), r"is wrong on a derived leaf \(a class", BOTH
    ),
    FoundFault(
        REFUSALS,
        lambda: raises_on_a_derived_leaf,
        r"claims a derived leaf \(a class.*Decline it: decide by `type\(mechanism\) is` or `==`",
    ),
    FoundFault("transforms-torch-float64-plain-clustered-softmax", too_large(), "is off by 0.5"),
    FoundFault(
        "dynamic_shapes-torch-float32-plain-clustered-softmax",
        too_large(lambda call: call.inputs["q"].shape[0] == 3),
        "is off by 0.5",
    ),
    FoundFault("autocast-torch-bfloat16-plain-clustered-softmax", too_large(), "is off by 0.5"),
    FoundFault(
        "threads-numpy-float32-threads-clustered-softmax",
        too_large(lambda call: threading.current_thread() is not threading.main_thread()),
        "is off by 0.5",
    ),
)
ELSEWHERE = {"sharding", "memory"}
"""Checks that need four devices (`on_four_devices_the_check.py`), or minutes (below)."""
SHOWN = {"outputs", "gradients", "stability", "dtypes"}
"""Checks whose code prints the wrong element beside the right one."""


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
def carrier(monkeypatch):
    monkeypatch.setattr(memory, "held_bytes", lambda library: HELD[0])
    carrier = TraceableDefinition()
    pa.register_backend(carrier)
    yield carrier
    pa.unregister_backend(carrier.name)


def printed(snippet):
    """The output of a failure's code as a script, and whether it ended in an AssertionError."""
    console, failed = io.StringIO(), False
    with contextlib.redirect_stdout(console):
        try:
            exec(compile(snippet, "snippet.py", "exec"), {"__name__": "__main__"})
        except AssertionError:
            failed = True
    return console.getvalue(), failed


def test_there_is_a_fault_for_each_check():
    assert {row.case.partition("-")[0] for row in PLANTED} | ELSEWHERE == set(CHECKS)


COMPILED = ("transforms", "dynamic_shapes")
"""Checks whose cases PyTorch compiles for seconds."""


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[pytest.mark.thorough] if row.case.startswith(COMPILED) else [])
        for row in PLANTED
    ],
    ids=lambda row: row.id,
)
def test_a_fault_is_named_and_its_code_reproduces_it_and_passes_without_it(carrier, row):
    pytest.importorskip(row.case.split("-")[1])
    case = case_of(row.case)
    fault = Fault(case.mechanism, case.mechanism, row.stages, "leaves", "", "planted", row.made())
    carrier.carry(fault)
    outcome = run_case(case, carrier.name)
    assert outcome.status == FAILED
    assert re.search(row.says, outcome.reason, re.S), outcome.reason
    carrier.carry(replace(fault, change=row.made()))
    text, failed = printed(outcome.snippet)
    assert failed, text
    kind, _, _ = outcome.reason.partition(" is off by")
    assert text.startswith(f"failed: {kind[:30]}"), outcome.reason
    numbers = re.search(r": (\S+) found, (\S+) expected", outcome.reason)
    if numbers and case.check in SHOWN and case.library == "numpy":
        shown = [float(number) for number in text.splitlines()[-1].split()]
        np.testing.assert_allclose(shown, [float(x) for x in numbers.groups()], rtol=1e-6)
    HELD[0] = 0
    carrier.carry(None)
    text, failed = printed(outcome.snippet)
    assert not failed, text
    assert text.startswith("passed")


def test_a_memory_failure_is_reproduced_by_its_code(carrier, monkeypatch):
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


def test_a_definition_that_contradicts_itself_and_a_method_that_it_lacks_are_named():
    @dataclass(frozen=True)
    class Unfinished(pa.Leaf):
        """The gradient is half of what it should be, and there is no `step`."""

        name: ClassVar[str] = "unfinished"
        inputs = pa.Inputs(v="b s n e")
        output = "b s n e"

        def forward(self, x, frame):
            return 2 * x["v"], ()

        def backward(self, x, frame, out, residuals, cotangent):
            return {"v": cotangent}

    try:
        case = case_of("gradients-numpy-float64-plain-random-unfinished")
        outcome = run_case(case, "reference")
        leaf, v = pa.parse("unfinished"), np.ones((1, 3, 1, 2))
        with pytest.raises(NotImplementedError, match=r"Unfinished .* no method `step`, which"):
            leaf.extend(leaf.init_cache(v, capacity=3), v)
    finally:
        pa.unregister_mechanism("unfinished")
    assert outcome.status == FAILED
    assert re.search(
        "^the definition of unfinished contradicts itself.*by its `backward`, and", outcome.reason
    )
