"""Dispatch: discovery, plans, reasons, strictness; with an out-of-tree backend."""

import warnings

import numpy as np
import pytest

import precondattn as pa
from precondattn.dispatch.described import explain_described
from precondattn.dispatch.discovery import discover
from precondattn_conformance.inputs import CallLayout, make_inputs


def inputs_of(expression, kind="clustered", **sizes):
    return make_inputs(pa.parse(expression), CallLayout("test", **sizes), kind)


def test_backends_are_discovered_by_entry_points_and_a_broken_one_is_listed_with_its_error(
    third_party,
):
    result = discover()
    assert [backend.name for backend in result.backends] == ["third_party", "reference"]
    assert result.broken == (
        ("broken", "AttributeError: module 'third_party_backend' has no attribute 'Missing'"),
    )
    explained = str(pa.Lucid().explain(**inputs_of("lucid")))
    _, _, not_chosen = explained.partition("not chosen:\n")
    assert "broken could not be imported: AttributeError" in not_chosen


def test_a_described_plan_has_a_backend_whose_code_can_not_be_imported(only_the_reference):
    error = "ModuleNotFoundError: No module named 'some_compiler'"
    pa.register_backend(answering(ModuleNotFoundError(error.partition(": ")[2]), name="importing"))
    explained = explain_described(pa.Softmax(), "numpy", "float32", None, "forward", {"t": 4})
    assert f"importing for softmax: could not be imported: {error}" in str(explained)
    with pytest.raises(ModuleNotFoundError, match="some_compiler"):
        pa.softmax(**inputs_of("softmax"))


def test_the_backends_of_this_repository_are_discovered_and_promise_every_convention():
    backends = discover().backends
    names = [backend.name for backend in backends]
    assert names == ["cupy", "pallas", "triton", "jax", "portable", "torch", "reference"]
    assert all(backend.promises == pa.CONVENTIONS for backend in backends)


@pytest.mark.parametrize("expression", ["lucid(laser)", "lucid[eps=0]"])
def test_a_claimed_piece_is_used_in_every_composition_that_contains_it(third_party, expression):
    x = inputs_of(expression)
    m = pa.parse(expression)
    out, pullback = m.vjp(**x)
    expected, expected_pullback = m.vjp(**x, backend="reference")
    np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-12)
    cotangent = np.ones_like(out)
    for name, gradient in expected_pullback(cotangent).items():
        np.testing.assert_allclose(pullback(cotangent)[name], gradient, rtol=1e-9, atol=1e-11)
    piece = str(m.program.calls[0].leaf)
    assert third_party.calls[0] == piece
    assert f"backward of {piece}" in third_party.calls


def test_the_largest_group_that_is_claimed_wins_unless_it_has_no_gradient_in_training(third_party):
    x = inputs_of("lucid")
    plan = pa.Lucid().explain(**x).plan
    assert [str(call.piece) for call in plan.calls] == [str(pa.group_of("lucid"))]
    np.testing.assert_allclose(pa.Lucid()(**x), pa.Lucid()(**x, backend="reference"), atol=1e-12)
    assert third_party.calls == [str(pa.group_of("lucid"))]
    explained = pa.Lucid().explain(**x, verb="vjp")
    assert explained.backends == ("third_party", "reference")
    assert [str(call.piece) for call in explained.plan.calls] == ["lucid_solve", "softmax"]
    assert "lucid as a whole has no gradient here" in str(explained)


def test_a_named_backend_refuses_rather_than_falls_back(third_party):
    x = inputs_of("laser")
    with pytest.raises(
        pa.UnsupportedError, match=r"softmax.*\n.*third_party: knows lucid_solve only"
    ):
        pa.Laser()(**x, backend="third_party")
    with (
        pa.use_backend("third_party"),
        pytest.raises(pa.UnsupportedError, match="requested backend third_party"),
    ):
        pa.Laser()(**x)
    np.testing.assert_array_equal(
        pa.Laser()(**x, backend=("third_party", "reference")), pa.Laser()(**x)
    )
    with pa.use_backend("reference"):
        assert pa.Lucid().explain(**inputs_of("lucid")).backends == ("reference", "reference")
    assert pa.Lucid().explain(**inputs_of("lucid")).backends == ("third_party",)


def test_explain_plans_an_extension_as_extend_does(third_party):
    x = inputs_of("lucid")
    cache = pa.Lucid().init_cache(**x, capacity=9)
    explained = pa.Lucid().explain(**x, cache=cache)
    assert explained.backends == ("reference", "reference")
    assert "third_party for lucid_solve: does not extend" in str(explained)


def test_a_kernel_that_raises_is_an_error_and_not_a_silent_fallback(third_party, monkeypatch):
    def broken(*args):
        raise RuntimeError("launch failed")

    monkeypatch.setattr(third_party.ThirdParty, "forward", broken)
    with pytest.raises(RuntimeError, match="launch failed"):
        pa.Lucid()(**inputs_of("lucid"))


def test_passing_over_an_accelerator_backend_warns_once_with_the_reason(only_the_reference):
    answer, here = "wants d a multiple of 16", frozenset({"cpu"})
    pa.register_backend(answering(answer, name="fast_here", accelerates=here))
    x = inputs_of("softmax")
    with pytest.warns(
        pa.PassedOverWarning, match="fast_here .* wants d a multiple of 16"
    ) as caught:
        pa.Softmax()(**x)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pa.Softmax()(**x)
        pa.Softmax()(**x, backend="reference")


def test_a_backend_of_another_library_is_not_queried(only_the_reference):
    asked, torch = AssertionError("queried about NumPy arrays"), frozenset({"torch"})
    pa.register_backend(answering(asked, name="for_torch", libraries=torch))
    explained = pa.Softmax().explain(**inputs_of("softmax"))
    assert "for_torch for softmax" not in str(explained)
    assert str(explained).endswith("for other array libraries: for_torch")
    why = "for_torch for softmax: supports arrays of torch, not of numpy"
    assert why in explained.text(others=True)


class Half:
    name = "half"

    def supports(self, mechanism, request):
        return pa.Support.yes()


class NoBackend:
    name = "plain"
    prepare = Half.supports


@pytest.mark.parametrize(
    ("register", "words"),
    [
        (lambda: pa.register_backend(Half()), "lacks forward"),
        (lambda: pa.register_backend(type("Nameless", (pa.Backend,), {})), "lacks name, prepare"),
        (lambda: pa.register_backend(NoBackend()), "lacks libraries, accelerates, wide_values"),
        (
            lambda: pa.register_backend(type("Both", (ForwardOnly, ForwardMethod), {})),
            "has prepare and supports",
        ),
    ],
)
def test_an_incomplete_backend_is_refused_with_what_it_lacks(only_the_reference, register, words):
    with pytest.raises(TypeError, match=words):
        register()
    with pytest.raises(ValueError, match="no backend 'reference' is registered"):
        pa.unregister_backend("reference")


def answering(answer, **named):
    """A backend whose answer to every piece is `answer`, or which raises it."""

    def prepare(self, piece, request):
        if isinstance(answer, Exception):
            raise answer
        return answer

    return type("Answering", (pa.Backend,), {"prepare": prepare, **named})


@pytest.mark.parametrize("answer", [None, pa.Support.no("a reason"), pa.Softmax()])
def test_an_answer_that_is_neither_a_runner_nor_a_reason_is_an_error(only_the_reference, answer):
    pa.register_backend(answering(answer, name="wrong"))
    with pytest.raises(TypeError, match=f"'wrong' must return .* found {type(answer).__name__}"):
        pa.Softmax()(**inputs_of("softmax"))


def top_left(**named):
    """A backend that aligns the first query with the first key if there are fewer queries."""
    promises = pa.CONVENTIONS - {"bottom_right"}
    return answering("never runs", **{"name": "top_left", "promises": promises, **named})


def test_a_backend_that_lacks_a_convention_has_to_be_named(only_the_reference):
    with pytest.raises(ValueError, match="'top_left' does not promise bottom_right, on which call"):
        pa.register_backend(top_left())
    for promises in ({"top_left"}, "bottom_right", ["float64"]):
        with pytest.raises(ValueError, match="promises must be a set of conventions, of bottom_ri"):
            pa.register_backend(top_left(only_by_name=True, promises=promises))
    pa.register_backend(top_left(only_by_name=True))
    q, k, v = np.ones((3, 1, 4, 2, 8))
    assert "top_left" not in pa.Softmax().explain(q, k, v).text(others=True)


class ForwardRunner(pa.Runner):
    """The definition of a leaf, without a gradient."""

    def __init__(self, leaf):
        self.forward = leaf.forward


class ForwardOnly(pa.Backend):
    name, wide_values, asked = "forward_only", True, 0

    def prepare(self, piece, request):
        self.asked += 1
        return ForwardRunner(piece) if len(piece.program.calls) == 1 else "one leaf at a time"


class ForwardMethod:
    """The same with methods of a piece; the class does not inherit from `Backend`."""

    name, wide_values, asked = "forward_only", True, 0

    def supports(self, mechanism, request):
        self.asked += 1
        return pa.Support(len(mechanism.program.calls) == 1, "one leaf at a time")

    def forward(self, mechanism, inputs, frame):
        return mechanism.forward(inputs, frame)


@pytest.mark.parametrize(
    ("backend", "claimant"), [(ForwardOnly, "ForwardRunner"), (ForwardMethod, "forward_only")]
)
def test_a_warm_call_asks_no_backend_again_and_a_lacking_gradient_is_an_error(
    only_the_reference, backend, claimant
):
    registered, x = backend(), inputs_of("lucid")
    pa.register_backend(registered)
    first = pa.Lucid()(**x)
    asked = registered.asked
    np.testing.assert_array_equal(pa.Lucid()(**x), first)
    assert asked == registered.asked > 0
    assert pa.Lucid().explain(**x).backends == ("forward_only", "forward_only")
    out, pullback = pa.Lucid().vjp(**x)
    with pytest.raises(NotImplementedError, match=f"'{claimant}' claimed .* method 'backward'"):
        pullback(out)


def test_backends_get_half_precision_inputs_unchanged_and_wider_arrays_cast_down(
    third_party, monkeypatch
):
    """Arrays passed from the reference to another backend are rounded to the call's dtype."""
    torch = pytest.importorskip("torch")
    recorded, original = [], third_party.ThirdParty.forward

    def spy(self, mechanism, inputs, frame):
        recorded.extend(inputs[name].dtype for name in inputs)
        return original(self, mechanism, {n: a.float() for n, a in inputs.items()}, frame)

    monkeypatch.setattr(third_party.ThirdParty, "forward", spy)
    x = {n: torch.tensor(a).bfloat16() for n, a in inputs_of("lucid").items()}
    out = pa.Lucid(pa.Laser())(**x)
    assert set(recorded) == {torch.bfloat16}
    assert out.dtype == torch.bfloat16
    expected = pa.Lucid(pa.Laser())(**x, backend="reference")
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
