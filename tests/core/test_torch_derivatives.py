"""PyTorch: second derivatives through every backend, and forward-mode differentiation."""

import pytest

pytest.importorskip("torch")

import torch
from torch.autograd import forward_ad

import precondattn as pa
from precondattn_conformance.declared import derived, expressions
from precondattn_conformance.inputs import CallLayout, make_inputs

LAYOUT = CallLayout("test", t=5, s=5)
WHOLE = [e for e in sorted({*expressions()} - derived()) if "[" not in e]


def tensors_of(m, *, requires_grad=True):
    made = make_inputs(m, LAYOUT, "clustered")
    return {name: torch.tensor(a, requires_grad=requires_grad) for name, a in made.items()}


def second_derivatives(function, x):
    """The second derivatives of a loss that is quadratic in the output."""
    inputs = list(x.values())
    first = torch.autograd.grad(function(x).square().sum(), inputs, create_graph=True)
    weights = [torch.linspace(0.5, 1, g.numel(), dtype=g.dtype).reshape(g.shape) for g in first]
    loss = sum((g * w).sum() for g, w in zip(first, weights, strict=True))
    return torch.autograd.grad(loss, inputs, materialize_grads=True)


@pytest.mark.parametrize("expression", WHOLE)
def test_second_derivatives_are_those_of_the_reference(expression):
    m = pa.parse(expression)
    x, lengths = tensors_of(m), torch.tensor([3, 5])
    result = second_derivatives(lambda x: m(**x, lengths=lengths), x)
    expected = second_derivatives(lambda x: m(**x, lengths=lengths, backend="reference"), x)
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("m", [pa.Linear(), pa.GatedDelta(), pa.CCQ(pa.GatedDelta())], ids=str)
def test_second_derivatives_go_through_states_of_caches(m):
    x = tensors_of(m)

    def in_two_steps(x, backend=None):
        cache, outs = m.init_cache(**x), []
        for part in (slice(0, 3), slice(3, 5)):
            tokens = {name: array[:, part] for name, array in x.items()}
            out, cache = m.extend(cache, **tokens, backend=backend)
            outs.append(out)
        return torch.cat(outs, dim=1)

    assert m.explain(**x).backends != ("reference",)
    result = second_derivatives(in_two_steps, x)
    expected = second_derivatives(lambda x: in_two_steps(x, "reference"), x)
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_first_derivative_keeps_no_graph_of_the_unfused_attention():
    x = tensors_of(pa.Softmax())
    (plain,) = torch.autograd.grad(pa.Softmax()(**x).sum(), x["k"])
    (again,) = torch.autograd.grad(pa.Softmax()(**x).sum(), x["k"], create_graph=True)
    assert plain.grad_fn is None
    assert again.requires_grad
    torch.testing.assert_close(again, plain)


def moved(function, x, tangents):
    """The tangent of the function's output, without any input that requires a gradient."""
    with forward_ad.dual_level():
        dual = {n: forward_ad.make_dual(a, tangents[n]) for n, a in x.items()}
        return forward_ad.unpack_dual(function(dual)).tangent


@pytest.mark.parametrize("m", [pa.Softmax(), pa.Lucid(pa.Laser()), pa.GatedDelta()], ids=str)
def test_forward_mode_keeps_the_tangent_of_a_call_and_of_steps(m):
    x = tensors_of(m, requires_grad=False)
    tangents = {name: torch.ones_like(array) for name, array in x.items()}
    expected = torch.func.jvp(lambda x: m(**x, backend="reference"), (x,), (tangents,))[1]

    def in_two_steps(x):
        cache = m.init_cache(**x, capacity=8)
        first, cache = m.extend(cache, **{name: a[:, :3] for name, a in x.items()})
        last, cache = m.extend(cache, **{name: a[:, 3:] for name, a in x.items()})
        return torch.cat([first, last], dim=1)

    torch.testing.assert_close(moved(lambda x: m(**x), x, tangents), expected)
    torch.testing.assert_close(moved(in_two_steps, x, tangents), expected)


def test_forward_mode_through_one_input_of_many():
    m = pa.Lucid()
    x = tensors_of(m, requires_grad=False)
    with forward_ad.dual_level():
        v = forward_ad.make_dual(x["v"], torch.ones_like(x["v"]))
        tangent = forward_ad.unpack_dual(m(x["q"], x["k"], v)).tangent
    torch.testing.assert_close(tangent, m(x["q"], x["k"], torch.ones_like(x["v"])))


def test_a_tangent_of_the_cotangent_alone_is_refused():
    x = tensors_of(pa.Linear())
    out = pa.Linear()(**x)
    with forward_ad.dual_level():
        cotangent = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(NotImplementedError, match='backend="reference"'):
            torch.autograd.grad(out, x["v"], cotangent)
