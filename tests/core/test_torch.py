"""PyTorch: calls compile into one graph; a backend that PyTorch can not trace is an operator.

Operators find a piece by its name; a class without a name of its own keeps its own mathematics.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

pytest.importorskip("torch")

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import precondattn as pa
from precondattn import arrays, frameworks
from precondattn.algebra import group, names
from precondattn.parallel.layouts import from_layout, to_layout
from precondattn.runner import LeafRunner
from precondattn_conformance.declared import derived, expressions
from tests.core.inputs import inputs_of
from tests.representatives import CACHED, CALLED

tensors_of = partial(inputs_of, library="torch", kind="clustered", requires_grad=True, t=6)


def results(function, x):
    """The output, and its gradients for a cotangent of ones."""
    out = function(**x)
    return out, torch.autograd.grad(out, list(x.values()), torch.ones_like(out))


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


COMPILED = {text for text in CALLED if "[" not in text} | {"laser", "mesa(gla)"}


# Slow: options and the other mechanisms, which other tests run uncompiled.
@pytest.mark.thorough(but=("atk(gdn2)", "dplr"))
@pytest.mark.parametrize(
    "expression",
    [
        text if text in COMPILED else pytest.param(text, marks=pytest.mark.slow)
        for text in sorted({*expressions()} - derived())
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
        x = tensors_of("lucid", t=t)
        lengths = torch.tensor([t - 2, t])
        torch.testing.assert_close(call(**x, lengths=lengths), shorthand(**x, lengths=lengths))
    out = call(**x, lengths=torch.tensor([12, 11]))
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1], pa.Lucid(eps=0)(**x)[1])


def second(function, x):
    """Derivatives of the gradients of a loss that is quadratic in the output."""
    inputs = list(x.values())
    first = torch.autograd.grad(function(**x).square().sum(), inputs, create_graph=True)
    return torch.autograd.grad(sum(g.sin().sum() for g in first), inputs)


def test_another_backends_gradient_is_used_compiled_and_differentiated(third_party):
    """The out-of-tree backend claims lucid_solve."""
    m, x = pa.Lucid(pa.Laser()), tensors_of("lucid(laser)")
    for masks in ({}, {"lengths": [4, 6]}):
        call, definition = partial(m, **masks), partial(m, **masks, backend="reference")
        torch.testing.assert_close(results(call, x), results(definition, x))
        torch.testing.assert_close(second(call, x), second(definition, x))
    assert {"lucid_solve", "backward of lucid_solve"} <= {*third_party.calls}
    torch.testing.assert_close(results(compiled(m), x), results(m, x))


def test_vmap_of_another_backend_calls_it(third_party):
    x, m = tensors_of("lucid", requires_grad=False), pa.Lucid(pa.Laser())
    stack = torch.stack([x["k"], 2 * x["k"], x["k"] + 1]).requires_grad_()
    expected = torch.stack([m(x["q"], k, x["v"]) for k in stack])
    third_party.calls.clear()
    mapped = torch.func.vmap(lambda k: m(x["q"], k, x["v"]))(stack)
    assert "lucid_solve" in third_party.calls
    torch.testing.assert_close(mapped, expected)
    torch.testing.assert_close(*(torch.autograd.grad(o.sum(), stack) for o in (mapped, expected)))


def test_transforms_of_another_backends_gradient_and_extensions_are_left_to_the_reference(
    third_party,
):
    """PyTorch's custom operators have no torch.func.grad; the reference has."""
    x, m = tensors_of("lucid", requires_grad=False), pa.Lucid()

    def gradient(backend=None):
        return torch.func.grad(lambda k: m(x["q"], k, x["v"], backend=backend).sum())(x["k"])

    found = gradient()
    assert not third_party.calls
    torch.testing.assert_close(found, gradient("reference"))
    with pytest.raises(pa.UnsupportedError, match="third_party"):
        gradient("third_party")
    x = tensors_of("lucid")
    extended = results(lambda **x: m.extend(m.init_cache(**x, capacity=6), **x)[0], x)
    torch.testing.assert_close(extended, results(partial(m, backend="reference"), x))


ROWS = dict.fromkeys("qkv", (2, 9, 2, 4))


@pytest.mark.parametrize(
    ("expression", "shapes"),
    [
        ("cross_covariance", {**ROWS, "logit_scale": (2,)}),  # A mapped weight.
        ("differential", {**ROWS, "q2": ROWS["q"], "k2": ROWS["q"], "lam": ()}),  # One number.
        ("nystrom[landmarks=3,start=batch]", ROWS),  # Sequences that depend on each other.
    ],
)
def test_vmap_makes_calls_one_after_another(expression, shapes):
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


@pytest.mark.thorough(but=["path", "gated_delta", "softmax[bias=true]"])
@pytest.mark.parametrize("text", CALLED)
def test_outputs_are_contiguous(text):
    """As `out.view(b, t, h * e)` needs them, whatever the length, the gradient and the verb."""
    m, grad = pa.parse(text), {"requires_grad": True}
    for t in (1, 65):
        x = inputs_of(m, t=t)
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


@dataclass(frozen=True)
class Twice(pa.Softmax):
    """2 softmax, under softmax's name: it is not registered."""

    def forward(self, x, frame):
        out, residuals = super().forward(x, frame)
        return 2 * out, residuals

    def backward(self, x, frame, out, residuals, cotangent):
        return super().backward(x, frame, out / 2, residuals, 2 * cotangent)


class AnyClass(pa.Backend):
    """A backend that runs any leaf by its own methods, as operators."""

    name = "any_class"
    preference = 1000

    def prepare(self, piece, request):
        is_leaf = len(piece.program.calls) == 1 and request.verb != "extend"
        return LeafRunner(piece, piece) if is_leaf else "runs one leaf of a full call"


def test_a_subclass_computes_its_own_mathematics_compiled_and_in_an_operator(register):
    x = torch.randn(3, 1, 5, 2, 4, generator=torch.Generator().manual_seed(0)).unbind(0)

    def require_twice(function):
        q, k, v = (a.clone().requires_grad_() for a in x)
        out, plain = function(q, k, v), pa.Softmax()(q, k, v)
        torch.testing.assert_close(out, 2 * plain)
        found, expected = (torch.autograd.grad(o.sum(), [q, k, v]) for o in (out, 2 * plain))
        torch.testing.assert_close(found, expected)

    torch.compiler.reset()
    require_twice(torch.compile(Twice(), fullgraph=True, backend="aot_eager"))
    # Inside a preconditioner, and after its parent with the same text.
    around, tau = pa.Temperature(Twice(), per="head"), torch.ones(2)
    require_twice(torch.compile(lambda *x: around(*x, tau=tau), backend="aot_eager"))
    register(AnyClass())
    assert "any_class" in Twice().explain(*x).backends
    require_twice(Twice())


def test_a_name_is_the_text_where_that_parses_back():
    assert names.name_of(pa.Lucid(pa.Laser())) == "lucid(laser)"
    assert names.name_of(Twice()) != names.name_of(pa.Softmax()) == "softmax"
    assert group.piece_named(names.name_of(Twice())) == Twice()
    assert pa.Lucid(Twice()).program != pa.Lucid().program
    with pytest.raises(ValueError, match="give the class a `name`"):
        group.piece_named("softmax #7")  # As in a graph of another process.
    kept = dict(names.named_pieces)  # Pieces of the package are not among them.
    m = pa.Lucid(pa.Laser(pa.Softmax(scale=0.123)))
    assert group.piece_named(names.name_of(m)) == m
    assert names.named_pieces == kept


def test_a_class_defined_again_gets_another_name(unregistered):
    def define():
        @dataclass(frozen=True)
        class Scaled(pa.Softmax):
            name = "scaled_in_a_notebook"

        return Scaled()

    first, second = define(), define()
    assert names.name_of(first) == "scaled_in_a_notebook" != names.name_of(second)
    assert group.piece_named(names.name_of(first)) == first
    assert group.piece_named(names.name_of(second)) == second


pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of .* prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning"),
]

X = torch.randn(2, 4, 2, 8, generator=torch.Generator().manual_seed(0))
LINEAR, LUCID = pa.Linear(), pa.Lucid()
ENTRIES = {
    "call": lambda x: LUCID(x, x, x),
    "one of many": lambda x: LUCID(X, x, X),
    "vjp": lambda x: LUCID.vjp(x, x, x),
    "init_cache": lambda x: LUCID.init_cache(x, x, x, capacity=8),
    "extend": lambda x: LUCID.extend(LUCID.init_cache(X, X, X, capacity=8), x, x, x),
    "extend_vjp": lambda x: LINEAR.extend_vjp(LINEAR.init_cache(X, X, X), x, x, x),
    "explain": lambda x: LUCID.explain(x, x, x),
    "with_lse": lambda x: pa.with_lse(pa.Softmax(), x, x, x),
    "pullback": lambda x: LUCID.vjp(X, X, X)[1](x),
    "key_mask": lambda x: LUCID(X, X, X, key_mask=x),
    "lengths": lambda x: LUCID(X, X, X, lengths=x),
    "segment_ids": lambda x: LUCID(X, X, X, segment_ids=x),
    "cu_seqlens": lambda x: LUCID(X[:1], X[:1], X[:1], cu_seqlens=x),
    "mask of extend": lambda x: LINEAR.extend(LINEAR.init_cache(X, X, X), X, X, X, key_mask=x),
    "alignment": lambda x: pa.alignment(x, 4),
    "to_layout": lambda x: to_layout(x, "zigzag", 2),
    "from_layout": lambda x: from_layout(x, "zigzag", 2),
    "outs of merge": lambda x: pa.merge([x], [X[..., 0]]),
    "lses of merge": lambda x: pa.merge([X], [x]),
    "states": lambda x: LINEAR.init_cache(X, X, X, states={"S": x}),
}


def nested(layout):
    return torch.nested.nested_tensor([X[0], X[1, :2]], layout=layout)


@pytest.mark.parametrize("entry", ENTRIES)
def test_nested_and_sparse_tensors_are_refused_by_name(entry):
    ENTRIES["call"](X)  # A dense call of the same shape passes, and is remembered.
    for tensor, kind in (
        (nested(torch.jagged), "nested"),
        (nested(torch.strided), "nested"),
        (X.to_sparse(), "sparse"),
        (X.to_mkldnn(), "layout _mkldnn"),
    ):
        with pytest.raises(TypeError, match=f"is a .*{kind}.*not supported"):
            ENTRIES[entry](tensor)
    from precondattn.layers.torch import Attention

    with pytest.raises(TypeError, match=r"x is a nested tensor.*give a mask"):
        Attention(8, heads=2, mechanism="lucid")(nested(torch.jagged))


def test_arrays_whose_entries_are_no_plain_numbers_are_refused():
    masked = torch.masked.masked_tensor(X, X > 0)
    numbers = X.numpy().astype(np.float64)
    gate = {"weight": np.matrix(numbers[0, 0]), "bias": np.zeros(2)}
    with pytest.raises(TypeError, match=r"weight must be an array .* found matrix"):
        pa.parse("contraction_gate")(numbers, **gate)
    for bad, found in (
        (masked, "MaskedTensor"),
        (X.to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (X.to(torch.complex64), "complex64"),
        (numbers.astype(object), "object"),
        (np.ma.masked_array(numbers), "MaskedArray"),
    ):
        with pytest.raises(TypeError, match=f"q must be .*; found {found}"):
            LUCID(bad, bad, bad)
    for entry in ENTRIES.values():
        with pytest.raises(TypeError, match=r"must be .*; found MaskedArray"):
            entry(np.ma.masked_array(numbers))


def test_an_array_of_float0_is_refused_and_arrays_of_numpy_stay_arrays_of_numpy():
    jax = pytest.importorskip("jax")
    nothing = np.zeros((1, 4, 2, 8), jax.dtypes.float0)
    known = dict(frameworks._of_type)
    frameworks._of_type.clear()  # As where the first array of a process is such a one.
    try:
        with pytest.raises(TypeError, match="q must be of dtype"):
            LUCID(nothing, nothing, nothing)
        assert arrays.library_of(np.zeros(1)) == "numpy"
    finally:
        frameworks._of_type.update(known)


def test_jit_trace_is_refused():
    LUCID(X, X, X)
    for m in (pa.Softmax(), LUCID, LINEAR):
        with pytest.raises(pa.UnsupportedError, match=r"torch\.jit\.trace .* use torch\.export"):
            torch.jit.trace(lambda x, m=m: m(x, x, x), (X,), check_trace=False)


@pytest.mark.thorough
@pytest.mark.parametrize("expression", ["lucid", "gated_delta"])
def test_make_fx_records_calls_steps_and_gradients_without_reading_entries(expression):
    m = pa.parse(expression)
    x = inputs_of(m, "torch", "clustered", t=4)
    cache = m.init_cache(**x, capacity=8)
    lengths = torch.tensor([3, 4])

    def called(*arrays):
        given = dict(zip(x, arrays, strict=True))
        return m(**given), m(**given, lengths=lengths), m.extend(cache, **given)[0]

    def gradients(*arrays):
        given = [array.detach().requires_grad_() for array in arrays]
        return torch.autograd.grad(m(**dict(zip(x, given, strict=True))).sum(), given)

    other = [array.flip(0) for array in x.values()]
    for function in (called, gradients):
        graph = make_fx(function)(*x.values())
        torch.testing.assert_close(graph(*other), function(*other))
