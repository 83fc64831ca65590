"""PyTorch: several cotangents at once, and mapped calls, are those made one after another."""

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.flop_counter import FlopCounterMode

import precondattn as pa
from precondattn.frameworks.torch import vmap as torch_vmap
from precondattn_conformance.declared import derived, expressions
from precondattn_conformance.inputs import CallLayout, make_inputs

# PyTorch maps the gradient of its own attention call by call, and says that this is slow.
pytestmark = pytest.mark.filterwarnings("ignore:.*_scaled_dot_product:UserWarning")

LAYOUT = CallLayout("test", t=5, s=5)
PER_HEAD = {"softmax[sink=true]", "mesa", "windowed[bias=true]", "hedgehog[factor=2,per=head](gla)"}
DECLARED = [
    pytest.param(expression, marks=pytest.mark.slow)
    if "[" in expression and expression not in PER_HEAD
    else expression
    for expression in sorted({*expressions()} - derived())
]


def tensors_of(expression, *, requires_grad=False, layout=LAYOUT):
    made = make_inputs(pa.parse(expression), layout, "clustered")
    return {name: torch.tensor(a, requires_grad=requires_grad) for name, a in made.items()}


def weights_like(out, *counts):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*counts, *out.shape, dtype=out.dtype, generator=generator)


def two_of(x):
    """Two calls: each input, and another batch of it."""
    return {name: torch.stack([a, a.flip(0) + 0.125]) for name, a in x.items()}


def one_after_another(function, *mapped):
    calls = [function(*each) for each in zip(*mapped, strict=True)]
    return torch.utils._pytree.tree_map(lambda *same: torch.stack(same), *calls)


def numbers_of(x):
    return [{name: a[i] for name, a in x.items()} for i in range(2)]


@pytest.fixture
def folded(monkeypatch):
    """The kinds of axes by which calls became one, as they are chosen."""
    kinds = []
    one_call = torch_vmap.OneCall

    class Recorded(one_call):
        def __init__(self, piece, sizes, kind, *rest):
            super().__init__(piece, sizes, kind, *rest)
            kinds.append(kind)

    monkeypatch.setattr(torch_vmap, "OneCall", Recorded)
    return kinds


@pytest.mark.parametrize("expression", DECLARED)
def test_several_cotangents_at_once_are_pulled_back_as_one_after_another(expression):
    x = tensors_of(expression, requires_grad=True)
    out, tensors = pa.parse(expression)(**x), list(x.values())
    weights = weights_like(out, 3)

    def pulled(w, **options):
        return torch.autograd.grad(
            out, tensors, w, retain_graph=True, materialize_grads=True, **options
        )

    expected = one_after_another(pulled, weights)
    torch.testing.assert_close(pulled(weights, is_grads_batched=True), expected)
    torch.testing.assert_close(torch.vmap(pulled)(weights), expected)


@pytest.mark.parametrize("expression", DECLARED)
def test_the_pullback_of_vjp_takes_several_cotangents_and_mapped_inputs(expression):
    m = pa.parse(expression)
    x = tensors_of(expression)
    out, pullback = m.vjp(**x)
    weights = weights_like(out, 2)
    torch.testing.assert_close(torch.vmap(pullback)(weights), one_after_another(pullback, weights))
    both = two_of(x)

    def value_and_gradients(x, w):
        out, pullback = m.vjp(**x)
        return out, pullback(w)

    expected = one_after_another(value_and_gradients, numbers_of(both), weights)
    torch.testing.assert_close(torch.vmap(value_and_gradients)(both, weights), expected)


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(
    "expression", ["softmax", "lucid", "laser(softmax[window=3])", "path", "hedgehog(gla)", "atk"]
)
def test_mapped_tokens_extend_a_cache_of_all(expression, backend, is_recorded):
    m = pa.parse(expression)
    x = tensors_of(expression)
    axes = {name: pattern.time_axis for name, pattern in m.inputs.items()}

    def tokens(x, start, stop):
        return {
            name: a if axes[name] is None else a.narrow(axes[name], start, stop - start)
            for name, a in x.items()
        }

    _, cache = m.extend(m.init_cache(**x, capacity=8, key_mask=True), **tokens(x, 0, 3))

    def extended(x, mask):
        copy = cache._replace(store={name: a.clone() for name, a in cache.store.items()})
        options = {} if is_recorded and backend == "torch" else {"backend": backend}
        options["donate"] = not is_recorded
        out, longer = m.extend(copy, **tokens(x, 3, 5), key_mask=mask, **options)
        return out, dict(longer.store)

    both = two_of(x)
    masks = torch.tensor([[[True, False]] * 2, [[False, True]] * 2])
    with torch.set_grad_enabled(is_recorded):
        expected = one_after_another(extended, numbers_of(both), masks)
        torch.testing.assert_close(torch.vmap(extended)(both, masks), expected)


@pytest.mark.parametrize("expression", ["linear", "gated_delta", "mesa", "ccq(gla)"])
def test_the_pullback_of_a_mapped_extension(expression):
    m = pa.parse(expression)
    x = tensors_of(expression)
    _, cache = m.extend(m.init_cache(**x), **x)

    def gradients(x, w):
        _, longer, pullback = m.extend_vjp(cache, **x)
        return pullback(w, {name: 2 * state for name, state in longer.store.items()})

    both, weights = two_of(x), weights_like(m(**x), 2)
    expected = one_after_another(gradients, numbers_of(both), weights)
    torch.testing.assert_close(torch.vmap(gradients)(both, weights), expected)
    _, _, pullback = m.extend_vjp(cache, **x)
    expected = one_after_another(pullback, weights)
    torch.testing.assert_close(torch.vmap(pullback)(weights), expected)


@pytest.mark.parametrize(
    ("expression", "kinds"),
    [
        ("lucid", ["b"]),
        ("cross_covariance", ["b", "nhu"]),  # A weight for each head, and none for each sequence.
        ("retention", ["b"]),
        ("nystrom[landmarks=3,start=batch]", []),
    ],
)
def test_gradients_of_several_cotangents_are_one_call(expression, kinds, folded):
    x = tensors_of(expression, requires_grad=True)
    out = pa.parse(expression)(**x)
    torch.autograd.grad(out, list(x.values()), weights_like(out, 3), is_grads_batched=True)
    assert folded == kinds


@pytest.mark.parametrize("mask", ["lengths", "key_mask", "segment_ids"])
@pytest.mark.parametrize("expression", ["lucid", "softmax[sink=true]"])
def test_maps_within_maps_of_cotangents_and_masks(expression, mask):
    m, x = pa.parse(expression), tensors_of(expression, requires_grad=True)
    masks = {
        "lengths": torch.tensor([[4, 5], [5, 2]]),
        "key_mask": torch.tensor([[[True, False, True, True, False]] * 2, [[True] * 5] * 2]),
        "segment_ids": torch.tensor([[[0, 0, 1, 1, 2]] * 2, [[0, 1, 1, 1, 1]] * 2]),
    }[mask]
    out = torch.vmap(lambda given: m(**x, **{mask: given}))(masks)
    expected = torch.stack([m(**x, **{mask: given}) for given in masks])
    torch.testing.assert_close(out, expected)
    weights, tensors = weights_like(out, 2, 3), list(x.values())

    def pulled(w, of=expected, **options):
        return torch.autograd.grad(of, tensors, w, retain_graph=True, **options)

    plain = one_after_another(lambda row: one_after_another(pulled, row), weights)
    torch.testing.assert_close(torch.vmap(torch.vmap(pulled))(weights), plain)

    for of in (out, expected):
        found = pulled(weights[0], of, is_grads_batched=True)
        torch.testing.assert_close(found, tuple(same[0] for same in plain))


def test_legacy_maps_within_each_other():
    vmap = torch._vmap_internals._vmap
    x = tensors_of("lucid", requires_grad=True)
    out, tensors = pa.Lucid()(**x), list(x.values())
    weights = weights_like(out, 2, 3)

    def pulled(w):
        return torch.autograd.grad(out, tensors, w, retain_graph=True)

    plain = one_after_another(lambda row: one_after_another(pulled, row), weights)
    torch.testing.assert_close(vmap(vmap(pulled))(weights), plain)


@pytest.mark.thorough
@pytest.mark.parametrize("expression", ["lucid", "linear", "laser", "softmax[window=2]"])
def test_second_derivatives_of_several_cotangents(expression):
    m = pa.parse(expression)
    x = tuple(tensors_of("softmax", layout=CallLayout("test", b=1, t=3, s=3)).values())
    x = tuple(a.requires_grad_() for a in x)
    assert torch.autograd.gradcheck(m, x, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(m, x, check_batched_grad=True)


@pytest.mark.parametrize("function", ["jacobian", "hessian"])
def test_vectorized_derivatives_are_the_others(function):
    derivative = getattr(torch.autograd.functional, function)
    x = tensors_of("lucid", layout=CallLayout("test", b=1, t=3, s=3))

    def call(q):
        out = pa.lucid(**x | {"q": q})
        return out.square().sum() if function == "hessian" else out

    expected = derivative(call, x["q"])
    torch.testing.assert_close(derivative(call, x["q"], vectorize=True), expected)


def test_no_calls_have_the_shape_of_one():
    x = tensors_of("lucid")
    none = torch.vmap(lambda q: pa.lucid(**x | {"q": q}))(x["q"].new_empty(0, *x["q"].shape))
    assert none.shape == (0, *pa.lucid(**x).shape)


class RunnerWithoutShapes(pa.Runner):
    """LUCID's solve with a residual whose shape it does not declare."""

    def __init__(self, leaf):
        self.leaf = leaf

    def forward(self, inputs, frame):
        out, residuals = self.leaf.forward(inputs, frame)
        return out, (*residuals, out.sum() * 0)

    def backward(self, inputs, frame, out, residuals, cotangent):
        return self.leaf.backward(inputs, frame, out, residuals[:-1], cotangent)


class WithoutShapes(pa.Backend):
    name = "without_shapes"
    preference = 20

    def prepare(self, piece, request):
        fits = isinstance(piece, pa.LucidSolve) and not request.verb.startswith("extend")
        return RunnerWithoutShapes(piece) if fits else "solves"


def test_a_backend_that_declares_no_shapes_is_called_for_each_cotangent(only_the_reference, folded):
    pa.register_backend(WithoutShapes())
    x = tensors_of("lucid", requires_grad=True)
    out, tensors = pa.Lucid()(**x), list(x.values())
    weights = weights_like(out, 3)
    found = torch.autograd.grad(out, tensors, weights, is_grads_batched=True, retain_graph=True)
    expected = one_after_another(
        lambda w: torch.autograd.grad(out, tensors, w, retain_graph=True), weights
    )
    torch.testing.assert_close(found, expected)
    mapped = torch.vmap(lambda q, k: pa.lucid(q, k, x["v"]))(
        *[torch.stack([a, 2 * a]) for a in tensors[:2]]
    )
    torch.testing.assert_close(mapped[1], pa.lucid(2 * x["q"], 2 * x["k"], x["v"]))


def test_flops_of_a_step_whose_pieces_keep_no_cache_are_counted():
    x = tensors_of("hedgehog(gla)")
    m = pa.parse("hedgehog(gla)")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        m.extend(m.init_cache(**x), **x)
    assert counter.get_total_flops() > 0
