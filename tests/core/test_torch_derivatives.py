"""PyTorch: second derivatives, forward mode, several cotangents at once, and mapped calls."""

from contextlib import nullcontext
from functools import partial

import pytest

pytest.importorskip("torch")

import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import precondattn as pa
from precondattn_conformance.declared import derived, expressions
from precondattn_conformance.inputs import slice_tokens
from tests.core.inputs import inputs_of

# PyTorch maps the gradient of its own attention call by call, and says that this is slow.
pytestmark = pytest.mark.filterwarnings("ignore:.*_scaled_dot_product:UserWarning")

tensors_of = partial(inputs_of, library="torch", kind="clustered", t=5)
SMALL = {"b": 1, "t": 3}
PER_HEAD = {"softmax[sink=true]", "mesa", "windowed[bias=true]", "hedgehog[factor=2,per=head](gla)"}
EVERY = sorted({*expressions()} - derived())
WHOLE = [e for e in EVERY if "[" not in e]
DECLARED = [
    pytest.param(e, marks=pytest.mark.slow) if "[" in e and e not in PER_HEAD else e for e in EVERY
]


def in_two_steps(m, x, backend=None):
    cache, outs = m.init_cache(**x, capacity=8), []
    for start, stop in ((0, 3), (3, 5)):
        out, cache = m.extend(cache, **slice_tokens(m, x, start, stop), backend=backend)
        outs.append(out)
    return torch.cat(outs, dim=1)


def second_derivatives(function, x):
    """The second derivatives of a loss that is quadratic in the output."""
    inputs = list(x.values())
    first = torch.autograd.grad(function(x).square().sum(), inputs, create_graph=True)
    weights = [torch.linspace(0.5, 1, g.numel(), dtype=g.dtype).reshape(g.shape) for g in first]
    loss = sum((g * w).sum() for g, w in zip(first, weights, strict=True))
    return torch.autograd.grad(loss, inputs, materialize_grads=True)


@pytest.mark.parametrize(
    ("expression", "is_in_steps"),
    [
        *((text, False) for text in WHOLE),
        *((text, True) for text in ("linear", "gated_delta", "ccq(gated_delta)")),
    ],
)
def test_second_derivatives_are_those_of_the_reference(expression, is_in_steps):
    m = pa.parse(expression)
    x, lengths = tensors_of(m, requires_grad=True), torch.tensor([3, 5])

    def call(x, backend=None):
        if is_in_steps:
            return in_two_steps(m, x, backend)
        return m(**x, lengths=lengths, backend=backend)

    expected = second_derivatives(lambda x: call(x, "reference"), x)
    torch.testing.assert_close(second_derivatives(call, x), expected)


def test_the_reference_has_second_derivatives():
    x = tensors_of("lucid", requires_grad=True, **SMALL)
    call = partial(pa.parse("lucid(laser)"), backend="reference")
    assert torch.autograd.gradgradcheck(call, tuple(x.values()))


def test_a_first_derivative_keeps_no_graph_of_the_unfused_attention():
    x = tensors_of("softmax", requires_grad=True)
    (plain,) = torch.autograd.grad(pa.Softmax()(**x).sum(), x["k"])
    (again,) = torch.autograd.grad(pa.Softmax()(**x).sum(), x["k"], create_graph=True)
    assert plain.grad_fn is None
    assert again.requires_grad
    torch.testing.assert_close(again, plain)


def moved(function, x, tangents):
    """The tangent of the function's output, without any input that requires a gradient."""
    with forward_ad.dual_level():
        dual = {
            n: forward_ad.make_dual(a, tangents[n]) if n in tangents else a for n, a in x.items()
        }
        return forward_ad.unpack_dual(function(dual)).tangent


@pytest.mark.parametrize("expression", ["softmax", "lucid(laser)", "gated_delta"])
def test_forward_mode_keeps_the_tangent_of_a_call_and_of_steps(expression):
    m = pa.parse(expression)
    x = tensors_of(m)
    tangents = {name: torch.ones_like(array) for name, array in x.items()}
    expected = torch.func.jvp(lambda x: m(**x, backend="reference"), (x,), (tangents,))[1]
    out, pull = m.vjp(**x)
    torch.testing.assert_close((out * expected).sum(), sum(g.sum() for g in pull(out).values()))
    for function in (lambda x: m(**x), lambda x: in_two_steps(m, x)):
        torch.testing.assert_close(moved(function, x, tangents), expected)


def test_a_tangent_of_the_cotangent_alone_is_refused():
    x = tensors_of("linear", requires_grad=True)
    out = pa.Linear()(**x)
    with forward_ad.dual_level():
        cotangent = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(NotImplementedError, match='backend="reference"'):
            torch.autograd.grad(out, x["v"], cotangent)


def weights_like(out, *counts):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*counts, *out.shape, dtype=out.dtype, generator=generator)


def two_of(x):
    """Two calls: each input, and another batch of it."""
    return {name: torch.stack([a, a.flip(0) + 0.125]) for name, a in x.items()}


def one_after_another(function, *mapped):
    """The results of calls with the entries of arrays, or of dicts of arrays."""
    pytree = torch.utils._pytree
    count = len(pytree.tree_leaves(mapped)[0])
    calls = [function(*pytree.tree_map(lambda a, i=i: a[i], mapped)) for i in range(count)]
    return pytree.tree_map(lambda *same: torch.stack(same), *calls)


def require_mapped(function, *mapped):
    torch.testing.assert_close(torch.vmap(function)(*mapped), one_after_another(function, *mapped))


def pullback_of(out, x):
    def pulled(w, **options):
        options |= {"retain_graph": True, "materialize_grads": True}
        return torch.autograd.grad(out, list(x.values()), w, **options)

    return pulled


@pytest.mark.parametrize("expression", DECLARED)
def test_several_cotangents_and_mapped_inputs_are_pulled_back_as_one_after_another(expression):
    m, x = pa.parse(expression), tensors_of(expression, requires_grad=True)
    out = m(**x)
    pulled, weights = pullback_of(out, x), weights_like(out, 2)
    expected = one_after_another(pulled, weights)
    torch.testing.assert_close(torch.vmap(pulled)(weights), expected)
    x = {name: a.detach() for name, a in x.items()}
    require_mapped(m.vjp(**x)[1], weights)

    def value_and_gradients(x, w):
        out, pullback = m.vjp(**x)
        return out, pullback(w)

    require_mapped(value_and_gradients, two_of(x), weights)


@pytest.mark.parametrize(
    ("expression", "backend", "is_recorded"),
    [
        *(("softmax", "torch", False), ("lucid", "torch", True), ("path", "torch", False)),
        *(("laser(softmax[window=3])", "torch", True), ("hedgehog(gla)", "torch", False)),
        *(("atk", "torch", True), ("path", "reference", True), ("gla", "reference", False)),
    ],
)
def test_mapped_tokens_extend_a_cache_of_all(expression, backend, is_recorded):
    m = pa.parse(expression)
    x = tensors_of(expression)
    cache = m.init_cache(**x, capacity=8, key_mask=True)
    _, cache = m.extend(cache, **slice_tokens(m, x, 0, 3))

    def extended(x, mask):
        copy = cache._replace(store={name: a.clone() for name, a in cache.store.items()})
        options = {} if is_recorded and backend == "torch" else {"backend": backend}
        options["donate"] = not is_recorded
        out, longer = m.extend(copy, **slice_tokens(m, x, 3, 5), key_mask=mask, **options)
        return out, dict(longer.store)

    with torch.set_grad_enabled(is_recorded):
        masks = torch.tensor([[[True, False]] * 2, [[False, True]] * 2])
        require_mapped(extended, two_of(x), masks)


@pytest.mark.parametrize("expression", ["gated_delta", "ccq(gla)"])
def test_the_pullback_of_a_mapped_extension(expression):
    m = pa.parse(expression)
    x = tensors_of(expression)
    _, cache = m.extend(m.init_cache(**x), **x)

    def gradients(x, w):
        _, longer, pullback = m.extend_vjp(cache, **x)
        return pullback(w, {name: 2 * state for name, state in longer.store.items()})

    weights = weights_like(m(**x), 2)
    require_mapped(gradients, two_of(x), weights)
    require_mapped(m.extend_vjp(cache, **x)[2], weights)


@pytest.mark.parametrize(
    ("expression", "mask"), [("softmax[sink=true]", "key_mask"), ("lucid", "segment_ids")]
)
def test_maps_within_maps_of_cotangents_and_masks(expression, mask):
    m, x = pa.parse(expression), tensors_of(expression, requires_grad=True)
    ids = torch.tensor([[[0, 0, 1, 1, 2]] * 2, [[0, 1, 1, 1, 1]] * 2])
    masks = ids if mask == "segment_ids" else ids != 1
    require_mapped(lambda given: m(**x, **{mask: given}), masks)
    out = m(**x, **{mask: masks[0]})
    weights, pulled = weights_like(out, 2, 2), pullback_of(out, x)
    plain = one_after_another(lambda row: one_after_another(pulled, row), weights)
    torch.testing.assert_close(torch.vmap(torch.vmap(pulled))(weights), plain)


@pytest.mark.parametrize("is_counted", [True, False])
def test_the_older_vmap_is_refused_with_what_to_use(is_counted):
    x = tensors_of("lucid", requires_grad=True)
    with FlopCounterMode(display=False) if is_counted else nullcontext():  # A call of operators.
        out = pa.lucid(**x)
    with pytest.raises(NotImplementedError, match=r"torch\.vmap of torch\.autograd\.grad"):
        pullback_of(out, x)(weights_like(out, 2), is_grads_batched=True)


def test_no_calls_have_the_shape_of_one():
    x = tensors_of("lucid")
    none = torch.vmap(lambda q: pa.lucid(**x | {"q": q}))(x["q"].new_empty(0, *x["q"].shape))
    assert none.shape == (0, *pa.lucid(**x).shape)
