"""Tensors that are not arrays of numbers are refused in one sentence, and so is torch.jit.trace."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.fx.experimental.proxy_tensor import make_fx

import precondattn as pa
from precondattn import arrays, frameworks
from precondattn.parallel.layouts import from_layout, to_layout
from tests.core.inputs import inputs_of

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
