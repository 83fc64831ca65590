"""The blocked backends beyond conformance: real block sizes, autograd and compilation, extremes."""

import numpy as np
import pytest
import torch

import precondattn as pa
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


@pytest.mark.parametrize(
    ("expression", "library"),
    [
        *((expression, "torch") for expression in MECHANISMS),
        *((e, "numpy") for e in ("softmax", "laser", "lucid", "path", "gated_delta", "gsa")),
    ],
)
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
@pytest.mark.parametrize(
    ("expression", "mask"),
    [
        *(("softmax", mask) for mask in ("lengths", "key_mask", "segment_ids")),
        *(("laser", "key_mask"), ("lucid", "segment_ids"), ("path", "lengths")),
        *(("lucid(path)", mask) for mask in ("key_mask", "segment_ids")),
    ],
)
def test_a_mask_of_more_keys_than_queries(mask, expression, library, small_blocks):
    """A query with a masked key still attends to the other keys."""
    m = pa.parse(expression)
    layout = CallLayout("fewer", b=2, t=11, s=30, h=4, n=2, d=8, e=8, mask=mask)
    x = make_inputs(m, layout, "clustered") | layout.masks()
    cotangent = np.random.default_rng(0).normal(size=m(**x, backend="reference").shape)
    result = with_gradient(m, given(library, x), cotangent, BACKENDS[library])
    for name, expected in with_gradient(m, x, cotangent, "reference").items():
        close(result[name], expected)


@pytest.mark.parametrize("verb", ["forward", "vjp", "extend"])
@pytest.mark.parametrize("library", [*BACKENDS, "jax"])
def test_blocked_backends_are_chosen_over_the_reference(library, verb):
    for m in map(pa.parse, MECHANISMS):
        x = make_inputs(m, CallLayout("plain"), "random")
        if library == "jax":
            jax = pytest.importorskip("jax")
            x = {name: jax.numpy.asarray(array) for name, array in x.items()}
        else:
            x = given(library, x)
        how = {"verb": verb}
        if verb == "extend":
            how = {"cache": m.init_cache(**x, capacity=x["k"].shape[1])}
        assert set(m.explain(**x, **how).backends) == {BACKENDS.get(library, "jax")}


@pytest.mark.parametrize("expression", ["lucid", "ccq(gated_delta)", "gsa"])
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


@pytest.mark.parametrize("expression", ["lucid", "path", "ccq(gated_delta)"])
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
