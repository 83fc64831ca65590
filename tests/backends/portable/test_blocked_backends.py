"""The blocked backends beyond conformance: real block sizes, autograd and compilation, extremes."""

import numpy as np
import pytest
import torch

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs

BACKENDS = {"numpy": "portable", "torch": "torch", "jax": "jax"}
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
    if library == "jax":
        array = pytest.importorskip("jax").numpy.asarray
    else:
        array = torch.asarray if library == "torch" else np.asarray
    return {name: array(a) for name, a in x.items()}


def close(result, expected, tolerance=1e-9):
    np.testing.assert_allclose(
        np.asarray(result), np.asarray(expected), rtol=tolerance, atol=tolerance
    )


def with_gradient(m, x, cotangent, backend):
    """Output and gradients, as NumPy's."""
    out, pullback = m.vjp(**x, backend=backend)
    return {"out": np.asarray(out)} | {n: np.asarray(g) for n, g in pullback(cotangent).items()}


def compare(library, m, x):
    """Output and gradients are the reference's, each relative to its largest number."""
    cotangent = np.random.default_rng(0).normal(size=m(**x, backend="reference").shape)
    expected = with_gradient(m, x, cotangent, "reference")
    x, d_out = given(library, x), given(library, {"out": cotangent})["out"]
    result = with_gradient(m, x, d_out, BACKENDS[library])
    for name, array in expected.items():
        scale = max(np.abs(array).max(), 1e-3)
        close(result[name] / scale, array / scale)


IN_JAX = [name for name in MECHANISMS if name.isidentifier() or name == "ccq(gated_delta)"]


@pytest.mark.parametrize(
    ("expression", "library"),
    [
        *((expression, "torch") for expression in MECHANISMS),
        *((e, "numpy") for e in ("softmax", "laser", "lucid", "path", "gated_delta", "gsa")),
        ("row_normalized", "jax"),
        *(pytest.param(e, "jax", marks=pytest.mark.thorough) for e in IN_JAX),
    ],
)
def test_several_blocks_of_the_default_size(expression, library):
    m = pa.parse(expression)
    # PyTorch's kernel is used for PaTH's past only if values are as wide as keys.
    e = 8 if "path" in expression else 6
    layout = CallLayout("blocks", b=1, t=301, s=301, h=4, n=2, d=8, e=e)
    compare(library, m, make_inputs(m, layout, "clustered"))


FEWER, EDGE = {"t": 11, "s": 30, "h": 4, "n": 2, "d": 8, "e": 8}, {"b": 1, "h": 2, "d": 8, "e": 4}
"""A query with a masked key still attends to the other keys; blocks have 8 tokens."""
MASKED = (
    *(("softmax", mask) for mask in ("lengths", "key_mask", "segment_ids")),
    *(("laser", "key_mask"), ("lucid", "segment_ids"), ("path", "lengths")),
    *(("lucid(path)", mask) for mask in ("key_mask", "segment_ids")),
)
CAPPED = "softmax[sink=true,softcap=1.5,"
SMALL = (
    *(
        (library, expression, "clustered", {"mask": mask, **FEWER})
        for library in ("numpy", "torch")
        for expression, mask in MASKED
    ),
    *(
        ("jax", *each)
        for each in (
            *(
                (expression, "clustered", {"mask": mask, **FEWER})
                for expression, mask in (("path", "lengths"), ("lucid[beta=true]", "key_mask"))
            ),
            *(
                (f"{CAPPED}{option}]", "clustered", {"mask": mask, "t": 21, "s": 21})
                for option, mask in (
                    ("read=mean_and_log_sum", "key_mask"),
                    ("bias=true", "segment_ids"),
                    ("forget=unscaled", "lengths"),
                )
            ),
            *(
                ("lucid[beta=true]", keys, {"t": tokens, "s": tokens, "n": 1, **EDGE})
                for keys, tokens in (("duplicate", 17), ("zero", 8), ("clustered", 7))
            ),
            ("softmax[causal=false]", "random", {"t": 21, "s": 15, **EDGE}),
        )
    ),
)


@pytest.mark.parametrize(("library", "expression", "keys", "sizes"), SMALL)
def test_small_blocks(library, expression, keys, sizes, small_blocks):
    m, layout = pa.parse(expression), CallLayout("small", **({"b": 2} | sizes))
    compare(library, m, make_inputs(m, layout, keys) | layout.masks())


@pytest.mark.parametrize("verb", ["forward", "vjp", "extend"])
@pytest.mark.parametrize("library", BACKENDS)
def test_blocked_backends_are_chosen_over_the_reference(library, verb):
    for m in map(pa.parse, MECHANISMS):
        x = given(library, make_inputs(m, CallLayout("plain"), "random"))
        how = {"verb": verb}
        if verb == "extend":
            how = {"cache": m.init_cache(**x, capacity=x["k"].shape[1])}
        assert set(m.explain(**x, **how).backends) == {BACKENDS[library]}


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
