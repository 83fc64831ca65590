"""Log-sum-exps and merges of partial attention, in every library."""

from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
from precondattn.parallel.partial_attention import part_vjp

FULL, WITH_SINK = pa.Softmax(causal=False), pa.Softmax(causal=False, sink=True)
KEEP = np.random.default_rng(3).random((2, 12)) > 0.4
KEEP[0, :6] = False  # The first six keys are hidden from the first sequence.
D_OUT = np.random.default_rng(5).normal(size=(2, 5, 4, 6))


def inputs(t=5):
    rng = np.random.default_rng(0)
    shapes = (2, t, 4, 8), (2, 12, 2, 8), (2, 12, 2, 6)
    return [rng.normal(size=shape) for shape in shapes]


def close(found, expected, atol=1e-13):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


@pytest.mark.parametrize("bounds", [(0, 12), (0, 5, 12), (0, 1, 2, 3, 12)])
def test_the_merge_of_any_parts_is_the_whole(bounds):
    q, k, v = inputs()
    whole = pa.with_lse(FULL, q, k, v)
    close(whole[:1], [FULL(q, k, v)])
    parts = [pa.with_lse(FULL, q, k[:, i:j], v[:, i:j]) for i, j in pairwise(bounds)]
    close(pa.merge(*zip(*parts, strict=True)), whole)


def test_parts_may_hide_keys_from_some_sequences_and_one_part_has_the_sink():
    q, k, v = inputs()
    sink = np.linspace(-1, 1, 4)
    first = pa.with_lse(FULL, q, k[:, :6], v[:, :6], key_mask=KEEP[:, :6])
    assert np.all(first[1][0] == -np.inf)
    second = pa.with_lse(WITH_SINK, q, k[:, 6:], v[:, 6:], key_mask=KEEP[:, 6:], sink=sink)
    whole = pa.with_lse(WITH_SINK, q, k, v, key_mask=KEEP, sink=sink)
    close(pa.merge(*zip(first, second, strict=True)), whole)


def test_pytorch_differentiates_the_merge_as_the_whole_and_of_no_keys_as_0():
    q, k, v = arrays = [torch.tensor(x, requires_grad=True) for x in inputs()]
    keep, cotangent = torch.tensor(KEEP), torch.tensor(D_OUT)
    first = pa.with_lse(FULL, q, k[:, :6], v[:, :6], key_mask=keep[:, :6])
    second = pa.with_lse(FULL, q, k[:, 6:], v[:, 6:], key_mask=keep[:, 6:])
    pairs = pa.merge(*zip(first, second, strict=True)), pa.with_lse(FULL, q, k, v, key_mask=keep)
    merged, direct = (
        torch.autograd.grad((o * cotangent).sum() + m.sin().sum(), arrays) for o, m in pairs
    )
    torch.testing.assert_close(merged, direct, rtol=1e-10, atol=1e-12)
    outs = [torch.zeros(1, 1, 2, 3, requires_grad=True) for _ in range(2)]
    lses = [torch.full((1, 1, 2), -torch.inf, requires_grad=True) for _ in range(2)]
    out, lse = pa.merge(outs, lses)
    assert torch.all(out == 0)
    assert torch.all(lse == -torch.inf)
    out.sum().backward()
    assert all(torch.all(part.grad == 0) for part in (*outs, *lses))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_log_sum_exp_is_in_float32(dtype):
    q, k, v = (torch.tensor(x).to(dtype) for x in inputs())
    out, lse = pa.with_lse(FULL, q, k, v)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    _, exact = pa.with_lse(FULL, q.double(), k.double(), v.double())
    torch.testing.assert_close(lse.double(), exact, rtol=1e-6, atol=1e-6)
    (_, _), pullback = pa.with_lse_vjp(FULL, q, k, v)
    assert all(g.dtype == dtype for g in pullback(out, lse).values())
    wide = [x.float() for x in (q, k, v)]
    with torch.autocast("cpu", dtype):
        cast = pa.with_lse(FULL, *wide)
    assert all(torch.equal(a, b) for a, b in zip(cast, pa.with_lse(FULL, *wide), strict=True))


def test_path_without_reflections_has_that_of_softmax():
    q, k, v = inputs(t=12)
    w, beta = np.random.default_rng(1).normal(size=k.shape), np.zeros(k.shape[:3])
    found = pa.with_lse(pa.Path(), q, k, v, w=w, beta=beta)
    close(found, pa.with_lse(pa.Softmax(), q, k, v), 1e-12)


def test_bad_input_is_named():
    q, k, v = inputs()
    out, lse = pa.with_lse(FULL, q, k, v)
    _, pullback = pa.with_lse_vjp(FULL, q, k, v)
    wrong_base = "with_lse: the mechanism must be a Softmax or Path"
    for error, words, call in (
        (TypeError, wrong_base, lambda: pa.with_lse(pa.Lucid(), q, k, v)),
        (TypeError, wrong_base, lambda: pa.with_lse(pa.Softmax(read="log_mean_exp"), q, k, v)),
        (TypeError, wrong_base, lambda: pa.with_lse("softmax", q, k, v)),
        (ValueError, r"found shape \(2, 12, 1, 8\)", lambda: pa.with_lse(FULL, q, k, k[:, :, :1])),
        (TypeError, "sinks", lambda: pa.with_lse(FULL, q, k, v, sinks=np.ones(4))),
        (ValueError, r"d_lse must have the shape \(2, 5, 4\)", lambda: pullback(out, lse[..., :1])),
        (ValueError, "at least one; found 0 outs and 0 lses", lambda: pa.merge([], [])),
        (ValueError, "found 2 outs and 1 lses", lambda: pa.merge([out, out], [lse])),
        (
            ValueError,
            r"lses\[1\] must have the shape \(2, 5, 4\)",
            lambda: pa.merge([out, out], [lse, lse[..., None]]),
        ),
    ):
        with pytest.raises(error, match=words):
            call()


FAR = 10**6.5
"""A factor of q and k by which scores are so large that their logarithm is rounded."""


def parts_of_gradient(make, backend, kind):
    """The gradients of three parts together, and those of the whole."""
    q, k, v = map(make, inputs())
    q, k = (FAR * x if kind == "far" else x for x in (q, k))
    keep = KEEP.copy()
    keep[1] = kind == "masked"
    masks = {"key_mask": make(keep)} if kind not in ("plain", "far") else {}
    d_out = make(D_OUT)
    _, pull = FULL.vjp(q, k, v, **masks)
    out, lse = pa.with_lse(FULL, q, k, v, **masks)
    parts = []
    for i, j in ((0, 5), (5, 6), (6, 12)):
        given = {"q": q, "k": k[:, i:j], "v": v[:, i:j]}
        of_part = {"key_mask": masks["key_mask"][:, i:j]} if masks else {}
        # A sequence without any key has λ = −∞.
        known = make(np.where(np.isinf(np.asarray(lse)), np.inf, np.asarray(lse)))
        parts.append(part_vjp(FULL, given, out, known, d_out, **of_part, backend=backend))
    found = {"q": sum(np.asarray(d["q"]) for d in parts)}
    found |= {n: np.concatenate([np.asarray(d[n]) for d in parts], 1) for n in "kv"}
    return found, pull(d_out)


@pytest.mark.parametrize(
    ("make", "backend", "kind"),
    [
        (*of, kind)
        for of in ((np.asarray, "reference"), (np.asarray, "portable"), (torch.tensor, "torch"))
        for kind in ("plain", "masked", "empty", "far")
        # The definition reads λ as it is given.
        if (of[1], kind) != ("reference", "far")
    ],
)
def test_gradients_of_parts_are_those_of_the_whole(make, backend, kind):
    found, expected = parts_of_gradient(make, backend, kind)
    for name, gradient in expected.items():
        atol = 1e-13 * (FAR if kind == "far" and name in "qk" else 1)
        np.testing.assert_allclose(found[name], gradient, atol=atol, err_msg=name)


@pytest.mark.parametrize(("make", "backend"), [(np.asarray, "portable"), (torch.tensor, "torch")])
def test_gradients_of_parts_need_no_forward_pass(make, backend, monkeypatch):
    q, k, v = map(make, inputs())
    out, lse = pa.with_lse(FULL, q, k, v)
    runs = type(FULL.explain(q, k, v, backend=backend, verb="vjp").plan.calls[0].runner)
    monkeypatch.setattr(runs, "forward", None)
    monkeypatch.setattr(runs, "forward_with_residuals", None)
    given = {"q": q, "k": k[:, :5], "v": v[:, :5]}
    assert set(part_vjp(FULL, given, out, lse, out, backend=backend)) == {"q", "k", "v"}
    with pytest.raises(TypeError):
        FULL.vjp(q, k, v, backend=backend)


def test_a_constant_in_place_of_the_lse_gives_gradients_without_division():
    q, k, v = leaves = [torch.tensor(x, requires_grad=True) for x in inputs()]
    keys, values = (x.repeat_interleave(2, 2) for x in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, keys) * 8**-0.5
    products = torch.einsum("bhts,bshe->bthe", torch.exp(scores - 0.7), values)
    d_out = torch.tensor(D_OUT)
    expected = torch.autograd.grad(products, leaves, d_out)
    shift = torch.full((2, 5, 4), 0.7, dtype=torch.float64)
    given = dict(zip("qkv", (x.detach() for x in leaves), strict=True))
    found = part_vjp(FULL, given, torch.zeros_like(d_out), shift, d_out)
    torch.testing.assert_close(tuple(found.values()), expected, rtol=1e-12, atol=1e-12)
