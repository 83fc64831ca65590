"""PyTorch: calls compile into one graph; a backend that PyTorch can not trace is an operator."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.utils.flop_counter import FlopCounterMode

import precondattn as pa
from precondattn_conformance.declared import derived, expressions
from precondattn_conformance.inputs import CallLayout, make_inputs
from tests.representatives import CACHED, CALLED

LAYOUT = CallLayout("test", t=6, s=6)


def tensors_of(expression, *, requires_grad=True, layout=LAYOUT):
    made = make_inputs(pa.parse(expression), layout, "clustered")
    return {name: torch.tensor(a, requires_grad=requires_grad) for name, a in made.items()}


def results(function, x):
    """The output, and its gradients for a cotangent of ones."""
    out = function(**x)
    return out, torch.autograd.grad(out, list(x.values()), torch.ones_like(out))


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


# Slow: options, which other tests run uncompiled; each mechanism is compiled by default.
@pytest.mark.thorough(but=("atk(gdn2)", "dplr"))
@pytest.mark.parametrize(
    "expression",
    [
        pytest.param(expression, marks=pytest.mark.slow) if "[" in expression else expression
        for expression in sorted({*expressions()} - derived())
    ],
)
def test_a_call_compiles_into_one_graph_with_its_gradient(expression):
    m, x = pa.parse(expression), tensors_of(expression)
    torch.testing.assert_close(results(compiled(m), x), results(m, x))


def test_a_compiled_call_takes_masks_another_length_and_a_bad_one():
    def shorthand(q, k, v, lengths):
        return pa.lucid(q, k, v, eps=0.0, lengths=lengths)

    call = compiled(shorthand)
    for t in (6, 9, 11):
        x = tensors_of("lucid", layout=CallLayout("test", t=t, s=t))
        lengths = torch.tensor([t - 2, t])
        torch.testing.assert_close(call(**x, lengths=lengths), shorthand(**x, lengths=lengths))
    out = call(**x, lengths=torch.tensor([12, 11]))
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1], pa.Lucid(eps=0)(**x)[1])


@pytest.mark.thorough
def test_extend_compiles_into_one_graph():
    m, x = pa.Lucid(), tensors_of("lucid", requires_grad=False)
    cache = m.init_cache(**x, capacity=8)
    step = compiled(lambda cache, donate, *x: m.extend(cache, *x, donate=donate))
    out, kept = step(cache, False, *(x[name][:, :4] for name in "qkv"))
    more, cache = step(kept, True, *(x[name][:, 4:] for name in "qkv"))
    assert not kept.store
    torch.testing.assert_close(torch.cat([out, more], dim=1), m(**x))
    assert cache.length.tolist() == [6, 6]


class TestAnotherBackendInPytorch:
    """The out-of-tree backend claims lucid_solve."""

    def test_its_gradient_is_used_and_can_be_differentiated(self, third_party):
        x = tuple(tensors_of("lucid", layout=CallLayout("test", b=1, t=3, s=3)).values())
        assert torch.autograd.gradcheck(pa.Lucid(), x)
        assert "backward of lucid_solve" in third_party.calls
        assert torch.autograd.gradgradcheck(pa.Lucid(), x)

    @pytest.mark.parametrize("masks", [{}, {"lengths": [4, 6]}])
    def test_outputs_and_gradients_are_the_definitions(self, third_party, masks):
        m, x = pa.Lucid(pa.Laser()), tensors_of("lucid(laser)")
        expected = results(lambda **x: m(**x, **masks, backend="reference"), x)
        torch.testing.assert_close(results(lambda **x: m(**x, **masks), x), expected)
        if not masks:
            torch.testing.assert_close(results(compiled(m), x), expected)
        assert "lucid_solve" in third_party.calls

    def test_vmap_folds_into_the_batch(self, third_party):
        x, m = tensors_of("lucid", requires_grad=False), pa.Lucid(pa.Laser())
        stack = torch.stack([x["k"], 2 * x["k"], x["k"] + 1]).requires_grad_()

        def call(k):
            return m(x["q"], k, x["v"])

        expected = torch.stack([call(k) for k in stack])
        third_party.calls.clear()
        mapped = torch.func.vmap(call)(stack)
        assert "lucid_solve" in third_party.calls
        torch.testing.assert_close(mapped, expected)
        gradients = [torch.autograd.grad(out.sum(), stack) for out in (mapped, expected)]
        torch.testing.assert_close(*gradients)

    def test_transforms_of_the_gradient_and_extensions_are_left_to_the_reference(self, third_party):
        """PyTorch's custom operators have no torch.func.grad; the reference has."""
        x = tensors_of("lucid", requires_grad=False)

        def loss(k, backend=None):
            return pa.Lucid()(x["q"], k, x["v"], backend=backend).sum()

        result = torch.func.grad(loss)(x["k"])
        assert not third_party.calls
        torch.testing.assert_close(result, torch.func.grad(loss)(x["k"], "reference"))
        with pytest.raises(pa.UnsupportedError, match="third_party"):
            torch.func.grad(loss)(x["k"], "third_party")
        m, x = pa.Lucid(), tensors_of("lucid")
        extended = results(lambda **x: m.extend(m.init_cache(**x, capacity=6), **x)[0], x)
        torch.testing.assert_close(extended, results(lambda **x: m(**x, backend="reference"), x))


def test_an_inference_call_records_nothing_and_gates_may_be_float32():
    x = tensors_of("lucid", requires_grad=False)
    assert not pa.Lucid()(**x).requires_grad
    x = {n: a.bfloat16() for n, a in x.items()}
    out = pa.Lucid(beta=True)(**x, lucid_beta=torch.rand(2, 6, 2))
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()


class SubtractionRunner(pa.Runner):
    """o₁ − λ o₂ by a backend that PyTorch's autograd can not differentiate."""

    def forward(self, inputs, frame):
        return inputs["o1"] - inputs["lam"] * inputs["o2"], ()


class Subtraction(pa.Backend):
    name = "subtraction"
    preference = 10

    def prepare(self, piece, request):
        is_full = piece == pa.Difference() and request.verb != "extend"
        return SubtractionRunner() if is_full else "does o1 - lam o2"


def test_vmap_of_a_backend_whose_piece_reads_a_single_number(only_the_reference):
    pa.register_backend(Subtraction())
    m = pa.Differential()
    x = tensors_of("differential", requires_grad=False)
    assert "subtraction" in m.explain(**x).backends
    mapped = torch.func.vmap(lambda q: m(**x | {"q": q}))(torch.stack([x["q"], -x["q"]]))
    torch.testing.assert_close(mapped[1], m(**x | {"q": -x["q"]}))


ROWS = dict.fromkeys("qkv", (2, 9, 2, 4))


@pytest.mark.parametrize(
    ("expression", "shapes"),
    [
        ("cross_covariance", {**ROWS, "logit_scale": (2,)}),  # A mapped weight.
        ("nystrom[landmarks=3,start=batch]", ROWS),  # Sequences that depend on each other.
    ],
)
def test_vmap_of_calls_that_are_no_longer_batch_makes_one_after_another(expression, shapes):
    m, rng = pa.parse(expression), np.random.default_rng(0)
    x = {n: torch.tensor(rng.normal(size=(3, *s)), requires_grad=True) for n, s in shapes.items()}

    def call(x):
        return m(**x, backend="torch")

    mapped = torch.func.vmap(call)(x)
    single = torch.stack([call({n: a[i] for n, a in x.items()}) for i in range(3)])
    torch.testing.assert_close(mapped, single)
    without = torch.func.vmap(call)({name: tensor.detach() for name, tensor in x.items()})
    torch.testing.assert_close(without, mapped.detach())
    weights = torch.rand(mapped.shape, dtype=torch.float64)
    found, expected = (torch.autograd.grad(o, [*x.values()], weights) for o in (mapped, single))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("expression", ["lucid_solve", "gated_delta", "laser"])
def test_gradients_without_operators_equal_those_of_operators_by_bytes(expression):
    """What counts a call sees operators; autograd alone gets the runner."""
    m, x = pa.parse(expression), tensors_of(expression)
    out, gradients = results(m, x)
    with FlopCounterMode(display=False):
        counted, expected = results(m, x)
    assert out.grad_fn.name() != counted.grad_fn.name()
    torch.testing.assert_close((out, gradients), (counted, expected), rtol=0, atol=0)


def test_changing_an_input_before_its_gradient_is_an_error():
    k, v = torch.randn(2, 1, 5, 2, 4).requires_grad_()
    given = k.clone()
    out = pa.LucidSolve()(given, v)
    given.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("d", [4, 6])
@pytest.mark.parametrize("expression", ["softmax", "laser"])
def test_values_whose_tokens_are_contiguous(expression, d):
    """As those of a triangular solve are; their width is that of the keys, or is padded."""
    q, k, v = torch.randn(1, 5, 3, d), torch.randn(1, 5, 3, d), torch.randn(1, 5, 3, 4)
    strided = v.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert strided.stride(1) == 1
    m = pa.parse(expression)
    (out, pull), (expected, pull_expected) = (m.vjp(q, k, a, backend="torch") for a in (strided, v))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(pull(out), pull_expected(out))


@pytest.mark.thorough(but=["path", "ccq", "gated_delta", "softmax[bias=true]"])
@pytest.mark.parametrize("text", CALLED)
def test_outputs_are_contiguous(text):
    """As `out.view(b, t, h * e)` needs them, whatever the length, the gradient and the verb."""
    m, grad = pa.parse(text), {"requires_grad": True}
    for t in (1, 8, 65):
        x = make_inputs(m, CallLayout("layout", t=t, s=t), "random")
        packed = {"segment_ids": [[i // 5 for i in range(t)]] * 2}
        for asarray, named in ((np.asarray, {}), (torch.tensor, {}), (torch.tensor, grad)):
            given = {name: asarray(array, **named) for name, array in x.items()}
            for masks in ({}, {"lengths": [t, (t + 1) // 2]}, packed):
                masks = {name: asarray(mask) for name, mask in masks.items()}
                outs = [m(**given, **masks), m.vjp(**given, **masks)[0]]
                if text in CACHED and "bias" not in x and "segment_ids" not in masks:
                    cache = m.init_cache(**given, capacity=t)
                    outs.append(m.extend(cache, **given, **masks)[0])
                for out in outs:
                    is_torch = isinstance(out, torch.Tensor)
                    assert out.is_contiguous() if is_torch else out.flags.c_contiguous, (t, masks)
