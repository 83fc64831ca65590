"""Soft caps, sinks and log-sum-exps against loops, and gradients against their complex step.

S = c tanh(s q·k / c) + bias,    λ = log(e^σ + Σ_j e^{S_j}),    o = Σ_j e^{S_j − λ} v_j
"""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import precondattn as pa
from tests.mathematics.problems import keys_of

BACKENDS = {"reference": np.asarray, "portable": np.asarray, "torch": torch.tensor}
OPTIONS = (
    {"softcap": 1.5},
    {"sink": True},
    {"softcap": 2.0, "sink": True, "bias": True},
    {"softcap": 0.7, "sink": True, "window": 4},
    {"softcap": 2.0, "sink": True, "causal": False},
    {"softcap": 2.0, "sink": True, "forget": "unscaled"},
    {"window": 3, "causal": False},
    {},
)
MASKS = ("none", "lengths", "key_mask", "segment_ids")


def problem(options, kind="random", b=2, t=9, s=9, h=4, n=2, d=4, e=3, seed=0):
    """The inputs of a call, by name."""
    rng = np.random.default_rng(seed)
    x = {
        "q": 2 * rng.normal(size=(b, t, h, d)),
        "k": keys_of(rng, kind, (b, s, n, d)),
        "v": rng.normal(size=(b, s, n, e)),
    }
    if options.get("sink"):
        x["sink"] = rng.normal(size=h)
    if options.get("bias"):
        x["bias"] = rng.normal(size=(1, h, t, s))
    if options.get("forget"):
        x["g"] = -rng.random((b, s, h))
    return x


def masks_of(name, b, s):
    if name == "lengths":
        return {"lengths": np.asarray([s, s - 4])}
    if name == "key_mask":
        mask = np.random.default_rng(1).random((b, s)) > 0.4
        mask[:, :2] = False  # The first queries of a causal call see nothing.
        return {"key_mask": mask}
    if name == "segment_ids":
        return {"segment_ids": np.repeat([[3, 5, 9]], [2, 4, s - 6], axis=1).repeat(b, axis=0)}
    return {}


def visible(options, masks, b, t, s):
    """Whether query i sees key j (b, t, s), and whether a query is not padding (b, t)."""
    position = np.arange(t)[:, None] + (s - t if options.get("causal", True) else 0)
    distance = position - np.arange(s)
    seen = distance >= 0 if options.get("causal", True) else np.full((t, s), True)
    if "window" in options:
        seen = seen & (np.abs(distance) < options["window"])
    seen, real = np.broadcast_to(seen, (b, t, s)), np.full((b, t), True)
    if "lengths" in masks:
        real = np.arange(t) < masks["lengths"][:, None]
        seen = seen & (np.arange(s) < masks["lengths"][:, None])[:, None] & real[:, :, None]
    if "key_mask" in masks:
        seen = seen & masks["key_mask"][:, None]
    if "segment_ids" in masks:
        ids = masks["segment_ids"]
        seen = seen & (ids[:, :, None] == ids[:, None])
    return seen, real


def by_loops(x, options, seen):
    """The output and λ, one query after another, from the formula."""
    (b, t, h, d), (_, s, n, e) = x["q"].shape, x["v"].shape
    out, lse = np.zeros((b, t, h, e), complex), np.full((b, t, h), -np.inf, complex)
    for i, a, j in np.ndindex(b, h, t):
        terms, values = [], []
        for m in np.flatnonzero(seen[i, j]):
            score = x["q"][i, j, a] @ x["k"][i, m, a * n // h] / np.sqrt(d)
            if "softcap" in options:
                score = options["softcap"] * np.tanh(score / options["softcap"])
            if "bias" in x:
                score += x["bias"][0, a, j, m]
            if "g" in x:
                score += x["g"][i, m + 1 : j + s - t + 1, a].sum()
            terms.append(score)
            values.append(x["v"][i, m, a * n // h])
        if "sink" in x:
            terms.append(x["sink"][a])
            values.append(np.zeros(e))
        if terms:
            lse[i, j, a] = np.log(np.sum(np.exp(terms)))
            out[i, j, a] = np.exp(terms - lse[i, j, a]) @ values
    return out, lse


def check(options, masks, backend, kind="random", **sizes):
    x = problem(options, kind, **sizes)
    (b, t), s = x["q"].shape[:2], x["k"].shape[1]
    there = masks.get("key_mask", np.full((b, s), True))[..., None]
    if "g" in x:
        x["g"] = x["g"] * there  # The gate of a masked key is open.
    seen, real = visible(options, masks, b, t, s)
    out, lse = (array.real for array in by_loops(x, options, seen))
    rng, real = np.random.default_rng(7), real[:, :, None]
    d_out, d_lse = rng.normal(size=out.shape), rng.normal(size=lse.shape)
    d_out, d_lse = d_out * real[..., None], np.where(real & np.isfinite(lse), d_lse, 0)
    array = BACKENDS[backend]
    given = {name: array(a) for name, a in x.items()}
    call_masks = {name: array(a) for name, a in masks.items()}
    (o, log_sum), pullback = pa.with_lse_vjp(
        pa.Softmax(**options), **given, **call_masks, backend=backend
    )
    gradients = pullback(array(d_out), array(d_lse))
    close = {"rtol": 1e-10, "atol": 1e-11}
    np.testing.assert_allclose(o, np.where(real[..., None], out, 0), **close)
    np.testing.assert_allclose(
        np.where(real, log_sum, 0), np.where(real, lse, 0), err_msg="λ", **close
    )
    for name, gradient in gradients.items():
        # Along a direction that every entry changes, by the complex step of the formula.
        direction = rng.normal(size=x[name].shape)
        moved = x | {name: x[name] + 1e-30j * (direction * there if name == "g" else direction)}
        slopes = (array.imag / 1e-30 for array in by_loops(moved, options, seen))
        expected = sum(np.sum(d * s) for d, s in zip((d_out, d_lse), slopes, strict=True))
        terms = np.asarray(gradient) * direction
        assert abs(np.sum(terms) - expected) <= 1e-10 * np.abs(terms).sum() + 1e-11, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("options", "mask"),
    [(options, MASKS[number % 4]) for number, options in enumerate(OPTIONS)]
    + [(OPTIONS[2], mask) for mask in MASKS],
    ids=str,
)
def test_output_lse_and_both_gradients_are_those_of_the_formula(options, mask, backend):
    check(options, masks_of(mask, 2, 9), backend)


@pytest.mark.parametrize("kind", ["clustered", "duplicate", "zero"])
def test_keys_that_are_alike_change_nothing(kind):
    check({"softcap": 1.0, "sink": True}, {}, "portable", kind)


def test_a_mask_of_every_key_leaves_the_sink_alone():
    x = problem({"sink": True})
    hidden = np.zeros((2, 9), dtype=bool)
    for backend in ("reference", "portable"):
        (out, lse), pullback = pa.with_lse_vjp(
            pa.Softmax(sink=True), **x, key_mask=hidden, backend=backend
        )
        assert not out.any()
        np.testing.assert_array_equal(lse, np.broadcast_to(x["sink"], lse.shape))
        gradients = pullback(np.ones_like(out), np.ones_like(lse))
        assert not any(gradients[name].any() for name in "qkv")
        np.testing.assert_allclose(gradients["sink"], 2 * 9)


def test_without_keys_and_sink_lse_is_minus_infinity_and_no_gradient_is_nan():
    x = problem({})
    hidden = np.zeros((2, 9), dtype=bool)
    for backend in ("reference", "portable"):
        (out, lse), pullback = pa.with_lse_vjp(pa.Softmax(), **x, key_mask=hidden, backend=backend)
        assert not out.any()
        assert np.all(lse == -np.inf)
        for cotangent in (1.0, np.inf, np.nan):
            gradients = pullback(np.zeros_like(out), np.full_like(lse, cotangent))
            assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("option", ["softcap=0.5", "sink=true"])
def test_lucid_solves_the_same_system_with_a_cap_or_a_sink(option):
    plain, other = pa.parse("lucid"), pa.parse(f"lucid(softmax[{option}])")
    assert plain.program.leaves[0] == other.program.leaves[0]
