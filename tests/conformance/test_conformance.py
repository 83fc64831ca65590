"""The conformance suite on this repository's backends, and on backends with planted faults."""

from pathlib import Path

import numpy as np
import pytest

import precondattn as pa
from precondattn.cache.capacity import _padded as padded
from precondattn.cache.kept import states_at
from precondattn.cache.sequences import reorder
from precondattn.spec.linear_family import LinearFamily
from precondattn_conformance import libraries
from precondattn_conformance.case import Case
from precondattn_conformance.cases import case_of, cases
from precondattn_conformance.checks import CHECK, Check
from precondattn_conformance.declared import compositions
from precondattn_conformance.design.levels import DRAWN
from precondattn_conformance.design.rows import design
from precondattn_conformance.inputs import REAL, REAL_GROUPED, CallLayout, real_heads
from precondattn_conformance.layout_names import layout_named
from precondattn_conformance.oracle import oracle
from precondattn_conformance.runner import Report, run_case
from precondattn_conformance.status import FAILED, UNSUPPORTED
from precondattn_conformance.tolerance import error


def test_every_preconditioner_around_every_mechanism_is_declared_or_refused_with_a_reason():
    result = compositions()
    assert {"lucid(path)", "differential(laser)", "row_normalized(lucid)"} <= {
        expression for expression, refused in result.items() if refused is None
    }
    assert "mean of its values" in result["laser(lucid)"]
    assert "no other preconditioner has used" in result["lucid(lucid)"]


@pytest.mark.parametrize("layout", [REAL, REAL_GROUPED], ids=lambda layout: layout.name)
def test_on_a_trained_models_keys_lucid_is_far_from_softmax(layout):
    """On i.i.d. keys the outputs hardly differ, so a test would pass without a solve."""
    sizes = {"q": layout.h, "k": layout.n, "v": layout.n}
    x = {name: real_heads(name, (1, layout.s, n, 32), layout) for name, n in sizes.items()}
    plain, solved = pa.softmax(**x), pa.lucid(**x)
    difference = np.linalg.norm(solved - plain, axis=(1, 3)) / np.linalg.norm(plain, axis=(1, 3))
    assert difference.shape == (1, 9)
    assert difference.min() > 0.3
    identity = np.broadcast_to(np.eye(layout.s)[None, :, None, :], (1, layout.s, 9, layout.s))
    keys = real_heads("k", (1, layout.s, 9, 32), REAL)
    inverse = pa.LucidSolve()(keys, identity)[0].transpose(1, 0, 2)
    condition = np.linalg.cond(inverse)
    assert condition.min() > 5
    assert condition.max() < 100


def outcome(expression, check="outputs", kind="clustered", **named):
    layout = CallLayout("fault", **named)
    return run_case(Case(check, expression, "torch", "float64", layout, kind), "faulty")


@pytest.fixture
def faulty(only_the_reference):
    """The reference as a backend in whose leaves a test plants a fault."""

    class Faulty(pa.Backend):
        name = "faulty"
        fault = None

        def supports(self, mechanism, request):
            if len(mechanism.program.calls) > 1:
                return pa.Support.no("leaves only")
            return pa.Support.yes(differentiable=True)

        def run(self, method, *args):
            if self.fault is None:
                return method(*args)
            cls, name, change = self.fault
            original = getattr(cls, name)
            setattr(cls, name, change(original))
            try:
                return method(*args)
            finally:
                setattr(cls, name, original)

        def forward(self, mechanism, inputs, frame):
            return self.run(mechanism.forward, inputs, frame)

        def backward(self, mechanism, *args):
            return self.run(mechanism.backward, *args)

        def step(self, mechanism, past, inputs, frame):
            names = {key: slot for slot, key in mechanism.program.slot_keys[0].items()}
            past = {names[key]: buffer for key, buffer in past.items()}
            out, updates = self.run(mechanism.step, past, inputs, frame)
            keys = {slot: key for key, slot in names.items()}
            return out, {keys[slot]: update for slot, update in updates.items()}

        def step_backward(self, mechanism, past, inputs, frame, cotangent, d_buffers):
            keys = mechanism.program.slot_keys[0]
            past, d_buffers = ({s: a[k] for s, k in keys.items()} for a in (past, d_buffers))
            gradients, d_past = self.run(
                mechanism.step_backward, past, inputs, frame, cotangent, d_buffers
            )
            return gradients, {keys[slot]: d_buffer for slot, d_buffer in d_past.items()}

    backend = Faulty()
    pa.register_backend(backend)
    return backend


def zeros(state):
    return {name: 0 * buffer for name, buffer in state.items()}


STATE_FAULTS = {
    "forgets the first state": (
        "run",
        lambda run: lambda self, state, x, frame: run(self, zeros(state), x, frame),
        {"caching", "states"},
    ),
    "drops the gradient of the last state": (
        "run_vjp",
        lambda vjp: (
            lambda self, state, x, frame, d, last: vjp(self, state, x, frame, d, zeros(last))
        ),
        {"states"},
    ),
    "gives no gradient to the first state": (
        "run_vjp",
        lambda vjp: lambda self, *args: (vjp(self, *args)[0], zeros(args[0])),
        {"states"},
    ),
    "decays by the gate of the token before": (
        "log_decay",
        lambda gate: lambda self, x, frame: gate(self, x, frame).roll(1, dims=2),
        {"outputs", "gradients", "caching", "states"},
    ),
    "writes half as strongly": (
        "stream",
        lambda stream: (
            lambda self, x, frame: (s := stream(self, x, frame))._replace(beta=0.5 * s.beta)
        ),
        {"outputs", "gradients", "caching", "states"},
    ),
}


CHECKS_OF_STATES = ("outputs", "gradients", "caching", "states")


def test_the_backend_passes_without_a_fault(faulty):
    assert {outcome("gated_delta", check).status for check in CHECKS_OF_STATES} == {"passed"}


@pytest.mark.parametrize("name", STATE_FAULTS)
def test_a_fault_planted_in_a_state_is_detected_by_the_checks_of_states(faulty, name):
    method, change, caught_by = STATE_FAULTS[name]
    faulty.fault = (LinearFamily, method, change)
    outcomes = {check: outcome("gated_delta", check).status for check in CHECKS_OF_STATES}
    assert {check for check, status in outcomes.items() if status == FAILED} == caught_by


BROKEN_OPERATIONS = {
    "crop leaves the cache as it is": ("cache.crop", "lucid", lambda cache, *_, **__: cache),
    "grow puts unused rows first": (
        "capacity._padded",
        "lucid",
        lambda buffer, kind, capacity: np.roll(
            padded(buffer, kind, capacity), capacity - buffer.shape[1], axis=1
        ),
    ),
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
    case = Case(
        "cache_operations", expression, "numpy", "float64", CallLayout("plain"), "clustered"
    )
    assert run_case(case, "reference").status == "passed"
    monkeypatch.setattr(f"precondattn.cache.{place}", broken)
    assert run_case(case, "reference").status == FAILED


def test_a_backend_that_returns_zeros_nan_or_the_wrong_sequence_fails(faulty, monkeypatch):
    original = type(faulty).forward
    for spoil in (lambda o: 0 * o, lambda o: o * float("nan"), lambda o: o.flip(0)):
        monkeypatch.setattr(
            type(faulty),
            "forward",
            lambda self, *args, spoil=spoil: (spoil(original(self, *args)[0]), ()),
        )
        assert outcome("softmax").status == FAILED


def test_a_backend_that_raises_after_claiming_support_fails(faulty, monkeypatch):
    def crash(*args):
        raise RuntimeError("launch failed")

    monkeypatch.setattr(type(faulty), "forward", crash)
    result = outcome("softmax")
    assert result.status == FAILED
    assert "launch failed" in result.reason


def test_a_backend_that_refuses_is_unsupported_with_its_own_reason(faulty, monkeypatch):
    monkeypatch.setattr(
        type(faulty), "supports", lambda self, mechanism, request: pa.Support.no("on Sundays")
    )
    result = outcome("softmax")
    assert result.status == UNSUPPORTED
    assert "on Sundays" in result.reason
    assert not Report([result]).is_good


def test_a_backend_that_runs_nothing_itself_has_no_coverage(third_party):
    layout = CallLayout("helped")
    helped = ("third_party", "reference")
    result = run_case(Case("outputs", "laser", "numpy", "float64", layout, "random"), helped)
    assert result.status == UNSUPPORTED
    assert "third_party supports none of this" in result.reason
    result = run_case(Case("outputs", "lucid(laser)", "numpy", "float64", layout, "random"), helped)
    assert result.status == "passed"


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        # The norm of a row without visible keys is so small that the division overflows float16.
        ("torch", "gradients-torch-float16-masked-clustered-row_normalized"),
        # A gradient beyond float16's range, for which infinity is correct.
        ("torch", "gradients-torch-float16-plain-zero-lucid(qk_norm[gain=true])"),
        # Sums whose terms cancel.
        ("torch", "gradients-torch-float32-block_and_one-clustered-temperature[per=head]"),
        ("torch", "gradients-torch-bfloat16-real_short-real-differential"),
    ],
)
def test_cases_that_failed_before_pass(backend, name):
    result = run_case(case_of(name), backend)
    assert result.status == "passed", result.text


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="regions can not be counted here")
def test_jaxs_compilation_cache_is_cleared_before_a_process_has_too_many_memory_regions(
    monkeypatch,
):
    case = case_of("outputs-jax-float64-plain-random-softmax")
    run_case(case, "reference")
    with_it = libraries.mapped_regions()
    assert run_case(case, "reference").status == "passed"
    assert libraries.mapped_regions() == with_it
    monkeypatch.setattr(libraries, "MOST_REGIONS", 0)
    libraries.named("jax").forget()
    assert libraries.mapped_regions() < with_it - 50


def test_an_id_determines_its_case():
    for case in cases("smoke", only_mechanisms=("lucid(path)",), only_libraries=("numpy",)):
        assert case_of(case.id) == case
    made = design("lucid", "torch")
    layouts = [made.case(row).layout for row in (*made.array.rows, *made.array.drawn(DRAWN))]
    assert all(layout_named(layout.name) == layout for layout in layouts)
    assert layout_named("b1t9s9h1n1d2e1.sideways") is None
    assert layout_named("b01t9s9h1n1d2e1") is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("outputs-numpy", "is no case"),
        ("output-numpy-float64-plain-random-lucid", "'output' is no check"),
        ("outputs-numpy-float64-plane-random-lucid", "'plane' is no layout"),
        ("outputs-numpy-float64-plain-rand-lucid", "'rand' is no kind of keys"),
        ("outputs-numpy-float64-plain-random-lucidity", "lucidity"),
    ],
)
def test_an_invalid_id_is_refused_with_its_wrong_part(text, reason):
    with pytest.raises(ValueError, match=reason):
        case_of(text)


def test_every_check_is_explained():
    page = Path(__file__).parents[2].joinpath("docs/conformance.md").read_text()
    for each in CHECK.values():
        assert f"\n### {each.name}\n" in page
        assert (each.__doc__ or "").strip() not in ("", Check.__doc__.strip())


def test_one_wrong_element_fails():
    expected = np.random.default_rng(0).normal(size=(4, 1000))
    result = expected.copy()
    result[2, 500] += 1e-3
    assert error(result, expected) > 1e-4
    assert np.isnan(error(np.full((2, 2), np.nan), np.ones((2, 2))))


def test_the_error_of_a_sum_whose_terms_cancel_is_relative_to_the_terms():
    assert error(np.asarray([1.001]), np.asarray([1.0]), terms=20.0) < 1e-4
    assert error(np.asarray([1.01]), np.asarray([1.0]), terms=20.0) > 1e-4
    layout = CallLayout("cancelling", t=33, s=33)
    result = oracle("temperature[per=head]", layout, "clustered", "float64")
    d_tau = np.max(np.abs(result.gradients["tau"]))
    assert d_tau < result.terms["tau"] < 100 * d_tau
    assert oracle("temperature(path)", layout, "clustered", "float64").terms
    assert oracle("qk_norm(temperature)", layout, "clustered", "float64").terms


def test_cases_have_stable_unique_ids():
    some = ("softmax", "softmax[window=3]", "lucid", "lucid(laser)", "lucid(softmax[bias=true])")
    ids = [case.id for case in cases("full", only_mechanisms=some)]
    assert len(ids) == len(set(ids))
    assert "outputs-numpy-float64-plain-clustered-lucid(laser)" in ids


@pytest.mark.parametrize(
    ("filters", "text"),
    [
        ({"level": "huge"}, "level must be one of smoke, full, stress; found 'huge'"),
        ({"only_checks": ("speed",)}, "'speed' is no check; there are outputs"),
        ({"only_dtypes": ("float8",)}, "'float8' is no dtype"),
        ({"only_libraries": ("tinygrad",)}, "'tinygrad' is no installed array library"),
        ({"only_mechanisms": ("lucit",)}, "unknown mechanism 'lucit'"),
    ],
)
def test_an_unknown_choice_is_refused(filters, text):
    with pytest.raises(ValueError, match=text):
        list(cases(**filters))
