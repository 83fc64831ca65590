"""Log-sum-exps and merges of partial attention, in every library."""

from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
from precondattn.parallel.partial_attention import part_vjp

FULL = pa.Softmax(causal=False)


def inputs(b=2, t=5, s=12, h=4, n=2, d=8, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(b, t, h, d)),
        rng.normal(size=(b, s, n, d)),
        rng.normal(size=(b, s, n, d - 2)),
    )


def in_parts(q, k, v, bounds, **named):
    parts = [pa.with_lse(FULL, q, k[:, i:j], v[:, i:j], **named) for i, j in pairwise(bounds)]
    return pa.merge(*zip(*parts, strict=True))


@pytest.mark.parametrize("bounds", [(0, 12), (0, 5, 12), (0, 1, 2, 3, 12)])
def test_the_merge_of_any_parts_is_the_whole(bounds):
    q, k, v = inputs()
    out, lse = in_parts(q, k, v, bounds)
    np.testing.assert_allclose(out, FULL(q, k, v), atol=1e-13)
    np.testing.assert_allclose(lse, pa.with_lse(FULL, q, k, v)[1], atol=1e-13)


def test_parts_may_hide_keys_from_some_sequences_and_one_part_has_the_sink():
    q, k, v = inputs()
    keep = np.random.default_rng(3).random((2, 12)) > 0.5
    keep[0, :6] = False  # The first part has no key for the first sequence.
    sink = np.linspace(-1, 1, 4)
    first = pa.with_lse(FULL, q, k[:, :6], v[:, :6], key_mask=keep[:, :6])
    assert np.all(first[1][0] == -np.inf)
    rest = pa.Softmax(causal=False, sink=True)
    second = pa.with_lse(rest, q, k[:, 6:], v[:, 6:], key_mask=keep[:, 6:], sink=sink)
    out, lse = pa.merge(*zip(first, second, strict=True))
    whole = pa.with_lse(rest, q, k, v, key_mask=keep, sink=sink)
    np.testing.assert_allclose(out, whole[0], atol=1e-13)
    np.testing.assert_allclose(lse, whole[1], atol=1e-13)


def test_parts_without_any_key_merge_to_nothing_with_a_zero_gradient():
    outs = [torch.zeros(1, 1, 2, 3, requires_grad=True) for _ in range(2)]
    lses = [torch.full((1, 1, 2), -torch.inf, requires_grad=True) for _ in range(2)]
    out, lse = pa.merge(outs, lses)
    assert torch.all(out == 0)
    assert torch.all(lse == -torch.inf)
    out.sum().backward()
    assert all(torch.all(part.grad == 0) for part in (*outs, *lses))


def test_pytorch_differentiates_the_merge_as_the_whole():
    arrays = [torch.tensor(x, requires_grad=True) for x in inputs()]
    keep = torch.rand(2, 12, generator=torch.Generator().manual_seed(0)) > 0.4
    keep[0, :6] = False
    cotangent = torch.tensor(np.random.default_rng(5).normal(size=(2, 5, 4, 6)))
    q, k, v = arrays
    first = pa.with_lse(FULL, q, k[:, :6], v[:, :6], key_mask=keep[:, :6])
    second = pa.with_lse(FULL, q, k[:, 6:], v[:, 6:], key_mask=keep[:, 6:])
    out, lse = pa.merge(*zip(first, second, strict=True))
    whole, whole_lse = pa.with_lse(FULL, q, k, v, key_mask=keep)
    pairs = [(out, lse), (whole, whole_lse)]
    merged, direct = (
        torch.autograd.grad((o * cotangent).sum() + m.sin().sum(), arrays) for o, m in pairs
    )
    for a, b in zip(merged, direct, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


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


def test_path_has_one_too():
    q, k, v = inputs(t=12)
    rng = np.random.default_rng(1)
    w = rng.normal(size=k.shape)
    beta = np.zeros(k.shape[:3])  # Without reflections PaTH is softmax.
    out, lse = pa.with_lse(pa.Path(), q, k, v, w=w, beta=beta)
    expected = pa.with_lse(pa.Softmax(), q, k, v)
    np.testing.assert_allclose(out, expected[0], atol=1e-12)
    np.testing.assert_allclose(lse, expected[1], atol=1e-12)


def test_bad_input_is_named():
    q, k, v = inputs()
    for mechanism in (pa.Lucid(), pa.Softmax(read="log_mean_exp"), "softmax"):
        with pytest.raises(TypeError, match="with_lse: the mechanism must be a Softmax or Path"):
            pa.with_lse(mechanism, q, k, v)
    with pytest.raises(ValueError, match=r"v is declared .*, found shape \(2, 12, 3, 6\)"):
        pa.with_lse(FULL, q, k, np.ones((2, 12, 3, 6)))
    with pytest.raises(TypeError, match="sinks"):
        pa.with_lse(FULL, q, k, v, sinks=np.ones(4))
    _, pullback = pa.with_lse_vjp(FULL, q, k, v)
    with pytest.raises(ValueError, match=r"d_lse must have the shape \(2, 5, 4\)"):
        pullback(np.ones((2, 5, 4, 6)), np.ones((2, 5, 1)))
    out, lse = pa.with_lse(FULL, q, k, v)
    with pytest.raises(ValueError, match="at least one; found 0 outs and 0 lses"):
        pa.merge([], [])
    with pytest.raises(ValueError, match="found 2 outs and 1 lses"):
        pa.merge([out, out], [lse])
    with pytest.raises(ValueError, match=r"lses\[1\] must have the shape \(2, 5, 4\)"):
        pa.merge([out, out], [lse, lse[..., None]])


FAR = 10**6.5
"""A factor of q and k by which scores are so large that their logarithm is rounded."""


def parts_of_gradient(make, backend, kind):
    """The gradients of three parts together, and those of the whole."""
    q, k, v = map(make, inputs())
    q, k = (FAR * x if kind == "far" else x for x in (q, k))
    keep = np.random.default_rng(3).random((2, 12)) > 0.4
    keep[0, :5] = False  # The first part has no key for the first sequence.
    keep[1] = kind == "masked"
    masks = {"key_mask": make(keep)} if kind not in ("plain", "far") else {}
    d_out = make(np.random.default_rng(5).normal(size=(2, 5, 4, 6)))
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
    q, k, v = map(torch.tensor, inputs())
    d_out = torch.tensor(np.random.default_rng(5).normal(size=(2, 5, 4, 6)))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(2, 2) for x in leaves[1:])
    scores = torch.einsum("bthd,bshd->bhts", leaves[0], keys) * 8**-0.5
    products = torch.einsum("bhts,bshe->bthe", torch.exp(scores - 0.7), values)
    expected = torch.autograd.grad(products, leaves, d_out)
    shift = torch.full((2, 5, 4), 0.7, dtype=torch.float64)
    given = {"q": q, "k": k, "v": v}
    found = part_vjp(FULL, given, torch.zeros_like(d_out), shift, d_out)
    for gradient, right in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-12, atol=1e-12)
