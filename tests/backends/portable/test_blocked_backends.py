"""The blocked backends beyond conformance: real block sizes, autograd and compilation, extremes."""

import numpy as np
import pytest
import torch

import precondattn as pa
from precondattn.arrays import library_of, namespace
from precondattn_conformance.inputs import CallLayout, make_inputs

BACKENDS = {"numpy": "portable", "torch": "torch"}
MECHANISMS = [
    "softmax",
    "softmax[window=70]",
    "softmax[bias=true]",
    "laser",
    "lucid",
    "lucid[normalize=rows]",
    "lucid[scale=9]",
    "path",
    "laser(path)",
    "path[forget=scaled]",
    "lucid(path)",
    "row_normalized",
    "gated_delta",
    "gla",
    "gsa",
    "ccq(gated_delta)",
    "ccq[covariance=query_weighted](linear)",
]


def given(library, x):
    return {n: torch.asarray(a) for n, a in x.items()} if library == "torch" else x


def close(result, expected, tolerance=1e-9):
    np.testing.assert_allclose(
        np.asarray(result), np.asarray(expected), rtol=tolerance, atol=tolerance
    )


def with_gradient(m, x, cotangent, backend):
    """Output and gradients, as NumPy's."""
    out, pullback = m.vjp(**x, backend=backend)
    gradients = pullback(torch.asarray(cotangent) if torch.is_tensor(out) else cotangent)
    return {"out": np.asarray(out)} | {n: np.asarray(g) for n, g in gradients.items()}


@pytest.mark.parametrize("library", BACKENDS)
@pytest.mark.parametrize("expression", MECHANISMS)
def test_several_blocks_of_the_default_size(expression, library):
    m = pa.parse(expression)
    # PyTorch's kernel is used for PaTH's past only if values are as wide as keys.
    e = 8 if "path" in expression else 6
    x = make_inputs(m, CallLayout("blocks", b=1, t=301, s=301, h=4, n=2, d=8, e=e), "clustered")
    cotangent = np.random.default_rng(0).normal(size=m(**x, backend="reference").shape)
    result = with_gradient(m, given(library, x), cotangent, BACKENDS[library])
    for name, expected in with_gradient(m, x, cotangent, "reference").items():
        scale = np.abs(expected).max()
        close(result[name] / scale, expected / scale)


@pytest.mark.parametrize("library", BACKENDS)
@pytest.mark.parametrize("expression", ["softmax", "laser", "lucid", "path", "lucid(path)"])
@pytest.mark.parametrize("mask", ["lengths", "key_mask", "segment_ids"])
def test_a_mask_of_more_keys_than_queries(mask, expression, library, small_blocks):
    """A query with a masked key still attends to the other keys."""
    m = pa.parse(expression)
    layout = CallLayout("fewer", b=2, t=11, s=30, h=4, n=2, d=8, e=8, mask=mask)
    x = make_inputs(m, layout, "clustered") | layout.masks()
    cotangent = np.random.default_rng(0).normal(size=m(**x, backend="reference").shape)
    result = with_gradient(m, given(library, x), cotangent, BACKENDS[library])
    for name, expected in with_gradient(m, x, cotangent, "reference").items():
        close(result[name], expected)


@pytest.mark.parametrize("library", BACKENDS)
@pytest.mark.parametrize(("dtype", "apart"), [("float64", 1500.0), ("float32", 130.0)])
def test_laser_reads_values_too_far_apart_for_one_shift(library, dtype, apart, small_blocks):
    """Values of whole blocks that are far apart, and single values far from their neighbours."""
    rng = np.random.default_rng(1)
    x = {n: rng.normal(size=(2, 45, 2, 4)) for n in "qkv"}
    x["v"][:, 10:20] += apart
    x["v"][:, 20:30] -= apart
    x["v"][:, 33, :, 1] += apart / 2
    x = {n: a.astype(dtype) for n, a in x.items()}
    cotangent = rng.normal(size=x["v"].shape).astype(dtype)
    result = with_gradient(pa.Laser(), given(library, x), cotangent, BACKENDS[library])
    wide = {n: a.astype("float64") for n, a in x.items()}
    expected = with_gradient(pa.Laser(), wide, cotangent.astype("float64"), "reference")
    for name in result:
        close(result[name], expected[name], 1e-9 if dtype == "float64" else 2e-4)


@pytest.mark.parametrize("library", BACKENDS)
@pytest.mark.parametrize("expression", MECHANISMS)
@pytest.mark.parametrize("verb", ["forward", "vjp", "extend"])
def test_blocked_backends_are_chosen_over_the_reference(expression, library, verb):
    m = pa.parse(expression)
    x = given(library, make_inputs(m, CallLayout("plain"), "random"))
    if verb == "extend":
        cache = m.init_cache(**x, capacity=x["k"].shape[1])
        explained = m.explain(cache=cache, **x)
    else:
        explained = m.explain(**x, verb=verb)
    assert set(explained.backends) == {BACKENDS[library]}


@pytest.mark.parametrize("expression", ["lucid", "gated_delta", "ccq(gated_delta)", "gsa"])
def test_an_extension_is_differentiable_as_the_references_is(expression):
    m = pa.parse(expression)
    layout = CallLayout("extended", b=2, t=9, s=9, h=2, n=2, d=4, e=4)
    x = given("torch", make_inputs(m, layout, "clustered"))

    def gradients(backend):
        leaves = {n: a.clone().requires_grad_() for n, a in x.items()}
        cache = m.init_cache(**leaves, capacity=9)
        outs = []
        for i0, i1 in ((0, 4), (4, 9)):
            tokens = {n: a[:, i0:i1] for n, a in leaves.items()}
            out, cache = m.extend(cache, **tokens, backend=backend)
            outs.append(out)
        total = sum((i + 1) * out.sin().sum() for i, out in enumerate(outs))
        return torch.autograd.grad(total, list(leaves.values()))

    for result, expected in zip(
        gradients(("torch", "reference")), gradients("reference"), strict=True
    ):
        close(result, expected)


@pytest.mark.parametrize("expression", ["softmax", "lucid", "laser", "path", "ccq(gated_delta)"])
def test_a_compiled_graph_contains_the_blocked_backend(expression):
    m = pa.parse(expression)
    x = given("torch", make_inputs(m, CallLayout("compiled"), "clustered"))

    def function(*arrays, backend):
        return m(**dict(zip(x, arrays, strict=True)), backend=backend).sin()

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    leaves = [a.clone().requires_grad_() for a in x.values()]
    outs = [compiled(*leaves, backend="torch"), function(*leaves, backend="reference")]
    close(outs[0].detach(), outs[1].detach())
    result, expected = (torch.autograd.grad(out.sum(), leaves) for out in outs)
    for own, other in zip(result, expected, strict=True):
        close(own, other)


def test_a_mapped_call_is_one_call_of_the_blocked_backend():
    rng = np.random.default_rng(2)
    q, k, v = (torch.asarray(rng.normal(size=(3, 2, 7, 2, 4))) for _ in range(3))
    for m in (pa.Lucid(), pa.Softmax(), pa.Laser()):
        result = torch.vmap(lambda *x, m=m: m(*x, backend="torch"))(q, k, v)
        expected = [m(*x, backend="reference") for x in zip(q, k, v, strict=True)]
        close(result, torch.stack(expected))


def test_a_function_transform_is_left_to_the_reference_and_refused_where_that_is_excluded():
    x = torch.asarray(np.random.default_rng(3).normal(size=(1, 5, 2, 4)))

    def loss(q, backend=None):
        return pa.Lucid()(q, x, x, backend=backend).sum()

    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    close(torch.func.grad(loss)(x), expected)
    with pytest.raises(pa.UnsupportedError, match="torch"):
        torch.func.grad(lambda q: loss(q, "torch"))(x)


@pytest.mark.parametrize("library", BACKENDS)
def test_a_cache_stores_the_tokens_of_a_feature_contiguously(library):
    x = given(library, {n: np.ones((2, 1, 3, 4)) for n in "qkvw"} | {"beta": np.ones((2, 1, 3))})
    store = pa.Path().init_cache(**x, capacity=8).store
    values, keys = store["v"], store["path(k,w,beta)"]
    assert tuple(values.shape) == tuple(keys.shape) == (2, 8, 3, 4)
    xp = namespace(values)
    assert is_in_one_piece(xp.permute_dims(values, (0, 2, 3, 1)))
    assert is_in_one_piece(xp.permute_dims(keys, (0, 2, 1, 3)))  # Every flush rewrites keys.


def is_in_one_piece(array):
    return array.is_contiguous() if library_of(array) == "torch" else array.flags.c_contiguous
