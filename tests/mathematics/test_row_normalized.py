"""Row-normalised attention against identities that hold for any implementation.

The definition is y_i = o_i / max(‖o_i‖, ε), o being the output of the base, row by row and head by
head; the norm is constant to the gradient unless `detach=False`. Everything is float64, and an
identity has to hold to 1e-10 of the largest number involved, and a gradient to 1e-7 of central
differences.
"""

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.identities import (
    assert_close,
    central_differences,
)
from tests.mathematics.loops import solved_values

sampled = settings(
    max_examples=15, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
LAYERS = [
    "row_normalized",
    "row_normalized[detach=false]",
    "row_normalized(softmax[window=2])",
    "row_normalized(laser)",
    "row_normalized(lucid)",
    "row_normalized[eps=0.5](lucid(laser))",
    "lucid(row_normalized)",
    "row_normalized(differential)",
    "row_normalized[detach=false](differential[per=token])",
    "differential[per=head](row_normalized)",
]
CHANNEL = "row_normalized[axis=channel](softmax[causal=false])"


def length(x, axis=-1):
    return np.sqrt(np.sum(x * x, axis=axis, keepdims=True))


def unit(o, eps=1e-6, axis=-1):
    return o / np.maximum(length(o, axis), eps)


class RowNormalizedProblem:
    """Random inputs of everything in `LAYERS`."""

    def __init__(self, rng, *, t, s=None, n=1, group=1, d=3, e=3, b=2):
        s = t if s is None else s
        self.rng, self.group, h = rng, group, n * group
        self.q, self.q2 = rng.normal(size=(2, b, t, h, d))
        self.k, self.k2 = rng.normal(size=(2, b, s, n, d))
        self.v = rng.normal(size=(b, s, n, e))
        self.lams = {
            "layer": np.asarray(rng.uniform(0.2, 2)),
            "head": rng.uniform(0.2, 2, size=h),
            "token": rng.uniform(0.2, 2, size=(b, t, h)),
        }

    def x(self, layer, **others):
        """All inputs of a layer, by name."""
        per = "token" if "token" in str(layer) else "head" if "head" in str(layer) else "layer"
        given = {"lam": self.lams[per], **others}
        return {name: given.get(name, getattr(self, name, None)) for name in layer.inputs}

    def like_output(self):
        return self.rng.normal(size=(*self.q.shape[:3], self.v.shape[-1]))


@st.composite
def problems(draw, square=True, longest=7):
    s = draw(st.integers(1, longest))
    return RowNormalizedProblem(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        t=s if square else draw(st.integers(1, s)),
        s=s,
        n=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        d=draw(st.integers(1, 4)),
        e=draw(st.integers(1, 4)),
    )


def rows_of_values(b, t, low=0.1):
    """Rows of lengths from `low` to 10, in both directions of every axis."""
    rng = np.random.default_rng(b * 100 + t)
    o = unit(rng.normal(size=(b, t, 2, 3)))
    return o * np.exp(rng.uniform(np.log(low), np.log(10), size=(b, t, 2, 1)))


# The definition of the bases


def softmax_weights(q, k, *, causal=True, window=None, scale=None):
    """A of shape (b, h, t, s); query i has position i + s − t."""
    t, s = q.shape[1], k.shape[1]
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = np.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    distance = np.arange(t)[:, None] + s - t - np.arange(s)
    masked = (distance < 0) & causal
    if window is not None:
        masked |= distance >= window
    scores = np.where(masked, -np.inf, scores)
    return np.exp(scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True))


def read(weights, v):
    """A v, with shared value heads."""
    v = np.repeat(v, weights.shape[1] // v.shape[2], axis=2)
    return np.einsum("bhts,bshe->bthe", weights, v)


def attention(text, q, k, v):
    """The base that `text` names, without row norm and difference."""
    weights = softmax_weights(q, k, window=2 if "window=2" in text else None)
    y = solved_values(k, v) if "lucid" in text else v
    return np.log(read(weights, np.exp(y))) if "laser" in text else read(weights, y)


def definition(layer, x):
    text, eps = str(layer), 0.5 if "eps=0.5" in str(layer) else 1e-6
    if "differential" not in text:
        return unit(attention(text, x["q"], x["k"], x["v"]), eps)
    lam = x["lam"] if x["lam"].ndim == 0 else x["lam"][..., None]
    maps = [attention(text, x[q], x[k], x["v"]) for q, k in (("q", "k"), ("q2", "k2"))]
    if text.startswith("differential"):
        maps = [unit(o, eps) for o in maps]
        return maps[0] - lam * maps[1]
    return unit(maps[0] - lam * maps[1], eps)


def conditioning_of(layer, x):
    """The factor by which a row norm may amplify the base's rounding errors: the largest 1/‖o‖."""
    actual = 1.0
    while hasattr(layer, "base"):
        x = {name: x[name] for name in layer.base.inputs}
        layer = layer.base
        actual = max(actual, 1 / max(length(layer(**x)).min(), 1e-3))
    return 10 * actual


# The piece


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("height", [1e-3, 1.0, 1e3, 1e100])
def test_rows_are_of_length_one_and_keep_their_direction(detach, height):
    o = height * rows_of_values(2, 5)
    y = pa.UnitRows(detach=detach)(o)
    assert_close(length(y), 1.0)
    assert_close(y * length(o), o)


@pytest.mark.parametrize("height", [1e-100, 1e-9, 1.0, 1e100])
def test_without_eps_every_row_is_of_length_one_however_short(height):
    assert_close(length(pa.UnitRows(eps=0)(height * rows_of_values(2, 5))), 1.0)


@pytest.mark.parametrize("eps", [1e-6, 0.5, 20.0])
def test_shorter_rows_are_divided_by_eps(eps):
    o = rows_of_values(2, 6, low=0.05) * min(1, eps)
    expected = np.where(length(o) > eps, o / length(o), o / eps)
    assert_close(pa.UnitRows(eps=eps)(o), expected)
    assert np.any(length(o) < eps)


def test_a_row_as_long_as_eps_is_of_length_one():
    o = np.array([0.3, 0.4]).reshape(1, 1, 1, 2)
    assert_close(pa.UnitRows(eps=0.5)(o), o / 0.5)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_a_detached_norm_only_divides_the_gradient(eps):
    o, dy = rows_of_values(2, 6), np.random.default_rng(0).normal(size=(2, 6, 2, 3))
    _, pullback = pa.UnitRows(eps=eps).vjp(o)
    assert_close(pullback(dy)["o"], dy / np.maximum(length(o), eps))


@pytest.mark.parametrize("eps", [0, 1e-6, 0.5])
def test_a_differentiated_norm_removes_the_part_of_the_gradient_along_the_row(eps):
    o, dy = rows_of_values(2, 6), np.random.default_rng(0).normal(size=(2, 6, 2, 3))
    y, pullback = pa.UnitRows(eps=eps, detach=False).vjp(o)
    gradient = pullback(dy)["o"]
    along = y * np.sum(y * dy, axis=-1, keepdims=True)
    long = length(o) > eps
    assert_close(gradient, np.where(long, (dy - along) / length(o), dy / (eps or 1)))
    assert_close(np.where(long, np.sum(y * gradient, axis=-1, keepdims=True), 0), 0, size=10)
    assert long.all() == (eps < 0.1)


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("eps", [0, 1e-6, 1.5])
def test_the_gradient_of_a_differentiated_norm_is_that_of_central_differences(eps, axis):
    o, dy = rows_of_values(2, 4), np.random.default_rng(0).normal(size=(2, 4, 2, 3))
    norms = length(o, -1 if axis == "token" else 1)
    assert np.abs(norms - eps).min() > 1e-3  # No kink within the step.
    piece = pa.UnitRows(eps=eps, detach=False, axis=axis)
    _, pullback = piece.vjp(o)
    expected = central_differences(lambda o: np.sum(dy * piece(o)), o)
    assert np.abs(pullback(dy)["o"] - expected).max() <= 1e-7 * np.abs(expected).max()


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("eps", [0, 1e-6])
def test_zero_rows_stay_zero_with_a_finite_gradient(eps, detach, axis):
    o, dy = rows_of_values(2, 6), np.random.default_rng(0).normal(size=(2, 6, 2, 3))
    o[:, 2] = 0
    o[..., 1] = 0
    y, pullback = pa.UnitRows(eps=eps, detach=detach, axis=axis).vjp(o)
    assert np.all(y[o == 0] == 0)
    assert_close(y, unit(o, 1e-6, axis=-1 if axis == "token" else 1))
    gradient = pullback(dy)["o"]
    assert np.all(np.isfinite(gradient))
    if eps:
        zero = (length(o, -1 if axis == "token" else 1) == 0) & np.ones_like(o, dtype=bool)
        assert_close(gradient[zero], dy[zero] / eps)


@pytest.mark.parametrize(("dtype", "eps"), [("float32", 1e-45), ("float64", 5e-324)])
def test_an_eps_whose_reciprocal_is_infinite_counts_as_0(dtype, eps):
    o = np.asarray([[3.0, 4.0], [0.0, 0.0]], dtype).reshape(1, 2, 1, 2)
    y, pullback = pa.UnitRows(eps=eps).vjp(o)
    np.testing.assert_array_equal(y[0, :, 0], np.asarray([[0.6, 0.8], [0.0, 0.0]], dtype))
    np.testing.assert_array_equal(pullback(np.ones_like(o))["o"][0, 1, 0], [1.0, 1.0])


def test_a_channel_is_a_row_over_all_tokens():
    o, dy = rows_of_values(2, 5), np.random.default_rng(0).normal(size=(2, 5, 2, 3))
    y, pullback = pa.UnitRows(axis="channel").vjp(o)
    assert_close(np.sum(y * y, axis=1), 1.0)
    assert_close(y, o / length(o, 1))
    assert_close(pullback(dy)["o"], dy / length(o, 1))
    _, pullback = pa.UnitRows(axis="channel", detach=False).vjp(o)
    along = np.sum(y * dy, axis=1, keepdims=True)
    assert_close(pullback(dy)["o"], (dy - y * along) / length(o, 1))


# The definition


@pytest.mark.parametrize("layer", LAYERS)
@sampled
@given(p=problems(square=False))
def test_output_is_the_definition(layer, p):
    layer = pa.parse(layer)
    x = p.x(layer)
    assert_close(layer(**x), definition(layer, x), size=conditioning_of(layer, x))


@pytest.mark.parametrize("layer", [text for text in LAYERS if text.startswith("row_normalized")])
@sampled
@given(p=problems(square=False))
def test_rows_of_the_output_are_of_length_one_head_by_head(layer, p):
    layer = pa.parse(layer)
    x = p.x(layer)
    o = layer.base(**x)
    out, long = layer(**x), length(o) > layer.eps
    assert_close(length(out)[long], 1.0)
    assert np.all(length(out)[~long] < 1)


@sampled
@given(problems(square=False))
def test_output_is_attention_with_rescaled_rows(p):
    """C(Av) = (CA)v."""
    weights = softmax_weights(p.q, p.k)
    rescaled = weights / length(read(weights, p.v)).transpose(0, 2, 1, 3)
    size = 10 * np.abs(rescaled).max()
    assert_close(pa.RowNormalized(eps=0)(p.q, p.k, p.v), read(rescaled, p.v), size=size)


@sampled
@given(problems(square=False))
def test_the_denominator_of_softmax_cancels(p):
    factors = p.rng.uniform(0.01, 100, size=(2, 1, p.q.shape[1], 1))
    undivided = factors * softmax_weights(p.q, p.k)
    layer = pa.RowNormalized(eps=0)
    size = conditioning_of(layer, p.x(layer))
    assert_close(layer(p.q, p.k, p.v), unit(read(undivided, p.v), 0), size=size)


@pytest.mark.parametrize("base", ["softmax", "lucid", "differential"])
@sampled
@given(p=problems(square=False), c=st.floats(1e-3, 1e3))
def test_the_size_of_the_values_does_not_matter_and_their_sign_does(base, p, c):
    layer = pa.RowNormalized(pa.parse(base), eps=0)
    x = p.x(layer)
    out, size = layer(**x), conditioning_of(layer, x)
    assert_close(layer(**(x | {"v": c * p.v})), out, size=size)
    assert_close(layer(**(x | {"v": -c * p.v})), -out, size=size)


def test_over_laser_the_size_of_the_values_matters():
    p, layer = (
        RowNormalizedProblem(np.random.default_rng(0), t=5),
        pa.RowNormalized(pa.Laser(), eps=0),
    )
    assert np.abs(layer(p.q, p.k, 3 * p.v) - layer(p.q, p.k, p.v)).max() > 0.1


@sampled
@given(problems(square=False))
def test_for_a_single_channel_the_output_is_the_sign(p):
    v = p.v[..., :1]
    o = read(softmax_weights(p.q, p.k), v)
    assume(np.abs(o).min() > 1e-5)
    assert_close(pa.RowNormalized()(p.q, p.k, v), np.sign(o))


@sampled
@given(problems(square=False))
def test_outside_or_inside_lucid_the_row_norm_is_the_same(p):
    inside, outside = pa.parse("lucid(row_normalized)"), pa.parse("row_normalized(lucid)")
    size = conditioning_of(outside, p.x(outside))
    out, pullback = inside.vjp(p.q, p.k, p.v)
    other, other_pullback = outside.vjp(p.q, p.k, p.v)
    assert_close(out, other, size=size)
    cotangent = p.like_output()
    gradients, others = pullback(cotangent), other_pullback(cotangent)
    for name, gradient in gradients.items():
        assert_close(gradient, others[name], size=size * max(1, np.abs(gradient).max()))


# Masks and zero rows


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("eps", [0, 1e-6])
def test_zero_values_give_zero_output_and_a_finite_gradient(eps, detach):
    p = RowNormalizedProblem(np.random.default_rng(0), t=6, n=2, group=2)
    v = p.v.copy()
    v[:, :3] = 0  # The values that the first three rows attend to.
    layer = pa.RowNormalized(eps=eps, detach=detach)
    out, pullback = layer.vjp(p.q, p.k, v)
    assert np.all(out[:, :3] == 0)
    assert_close(length(out[:, 3:]), 1.0)
    gradients = pullback(p.like_output())
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())
    out, pullback = layer.vjp(p.q, p.k, 0 * v)
    assert np.all(out == 0)
    dy = p.like_output()
    gradients = pullback(dy)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())
    assert np.all(gradients["q"] == 0)
    assert np.all(gradients["k"] == 0)
    if eps:
        expected = pa.Softmax().vjp(p.q, p.k, 0 * v)[1](dy / eps)["v"]
        assert_close(gradients["v"], expected)


@sampled
@given(problems())
def test_rows_without_a_visible_key_are_zero_without_a_gradient(p):
    mask = p.rng.random(p.k.shape[:2]) < 0.5
    blind = np.cumsum(mask, axis=1) == 0
    k, v = (np.where(mask[..., None, None], x, np.nan) for x in (p.k, p.v))
    for detach in (True, False):
        layer = pa.RowNormalized(detach=detach)
        out, pullback = layer.vjp(p.q, k, v, key_mask=mask)
        assert np.all(out[blind] == 0)
        assert_close(length(out[~blind]), 1.0)
        gradients = pullback(p.like_output())
        assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())
        assert np.all(gradients["q"][blind] == 0)
        assert np.all(gradients["k"][~mask] == 0)
        assert np.all(gradients["v"][~mask] == 0)


# Gradients


def gradient_of_base(layer, x, cotangent):
    """The base's gradient under C dy."""
    out, pullback = layer.base.vjp(**x)
    return pullback(cotangent / np.maximum(length(out), layer.eps))


@pytest.mark.parametrize("base", ["softmax", "laser", "lucid", "path", "differential[per=head]"])
@sampled
@given(p=problems(square=False))
def test_by_default_the_gradient_is_the_base_s_under_the_rescaled_cotangent(base, p):
    layer = pa.RowNormalized(pa.parse(base))
    w, beta = unit(p.k2), p.rng.uniform(0, 2, size=p.k.shape[:3])
    x, cotangent = p.x(layer, w=w, beta=beta), p.like_output()
    _, pullback = layer.vjp(**x)
    gradients, expected = pullback(cotangent), gradient_of_base(layer, x, cotangent)
    assert set(gradients) == set(expected) == set(x)
    for name, gradient in gradients.items():
        assert_close(gradient, expected[name], size=max(1e-3, np.abs(expected[name]).max()))


@pytest.mark.parametrize("base", ["softmax", "lucid", "differential[per=token]"])
def test_by_default_finite_differences_agree_only_if_the_norm_is_kept_constant(base):
    p = RowNormalizedProblem(np.random.default_rng(1), t=3, n=2, group=2, d=2, e=2)
    layer = pa.RowNormalized(pa.parse(base))
    x, cotangent = p.x(layer), p.like_output()
    held = cotangent / length(layer.base(**x))
    _, pullback = layer.vjp(**x)
    for name, gradient in pullback(cotangent).items():
        with_held_norm, as_it_is = (
            central_differences(loss, x[name])
            for loss in (
                lambda moved, name=name: np.sum(held * layer.base(**(x | {name: moved}))),
                lambda moved, name=name: np.sum(cotangent * layer(**(x | {name: moved}))),
            )
        )
        size = max(1, np.abs(with_held_norm).max())
        assert np.abs(gradient - with_held_norm).max() <= 1e-7 * size
        assert np.abs(gradient - as_it_is).max() > 1e-2


@sampled
@given(problems(square=False))
def test_without_detach_the_gradient_of_the_values_is_orthogonal_to_them(p):
    """Σ v∘dv = Σ o·do, which is 0 for do = C(dy − y (y·dy)), and Σ y·dy for do = C dy."""
    cotangent = p.like_output()
    for detach in (True, False):
        layer = pa.RowNormalized(eps=0, detach=detach)
        out, pullback = layer.vjp(p.q, p.k, p.v)
        b, _, h, _ = out.shape
        of_heads = np.sum(out * cotangent, axis=(1, 3)).reshape(b, h // p.group, p.group).sum(-1)
        gradient = pullback(cotangent)["v"]
        actual = np.sum(p.v * gradient, axis=(1, 3))
        size = conditioning_of(layer, p.x(layer)) * np.abs(cotangent).sum()
        assert_close(actual, of_heads if detach else 0.0, size=size)


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("base", ["softmax", "lucid", "differential[per=head]"])
def test_torch_and_jax_differentiate_the_call_alike(base, detach):
    torch = pytest.importorskip("torch")
    jax = pytest.importorskip("jax")
    p = RowNormalizedProblem(np.random.default_rng(0), t=5, n=2, group=2)
    layer = pa.RowNormalized(pa.parse(base), detach=detach)
    x, cotangent = p.x(layer), p.like_output()
    out, pullback = layer.vjp(**x)
    gradients = pullback(cotangent)
    tensors = {name: torch.tensor(array, requires_grad=True) for name, array in x.items()}
    result = layer(**tensors)
    result.backward(torch.tensor(cotangent))
    assert_close(result.detach().numpy(), out)
    actual = jax.grad(lambda x: (layer(**x) * cotangent).sum())(
        {name: jax.numpy.asarray(array) for name, array in x.items()}
    )
    for name, gradient in gradients.items():
        assert_close(tensors[name].grad.numpy(), gradient)
        assert_close(np.asarray(actual[name]), gradient)


# Channels


@sampled
@given(problems(square=False))
def test_channels_are_normalised_over_the_queries(p):
    layer = pa.parse(CHANNEL)
    out = layer(p.q, p.k, p.v)
    o = read(softmax_weights(p.q, p.k, causal=False), p.v)
    size = 10 / max(length(o, 1).min(), 1e-3)
    assert_close(out, unit(o, axis=1), size=size)
    assert_close(np.sum(out * out, axis=1)[:, None][length(o, 1) > 1e-6], 1.0, size=size)


@sampled
@given(problems())
def test_the_order_of_tokens_does_not_matter_to_channels(p):
    layer, order = pa.parse(CHANNEL), p.rng.permutation(p.q.shape[1])
    out = layer(p.q, p.k, p.v)
    moved = layer(*(x[:, order] for x in (p.q, p.k, p.v)))
    o = read(softmax_weights(p.q, p.k, causal=False), p.v)
    assert_close(moved, out[:, order], size=10 / max(length(o, 1).min(), 1e-3))


@pytest.mark.parametrize("detach", ["true", "false"])
@sampled
@given(p=problems(), data=st.data())
def test_channels_of_sequences_and_segments_are_independent(detach, p, data):
    layer = pa.parse(f"row_normalized[axis=channel,detach={detach},eps=0](softmax[causal=false])")
    t, cotangent = p.q.shape[1], p.like_output()
    lengths = np.array([data.draw(st.integers(0, t)) for _ in range(2)])
    padding = np.arange(t) >= lengths[:, None]
    masked = [np.where(padding[..., None, None], np.nan, x) for x in (p.q, p.k, p.v)]
    padded, padded_pullback = layer.vjp(*masked, lengths=lengths)
    packed, packed_pullback = layer.vjp(p.q, p.k, p.v, segment_ids=padding.astype(int))
    assert np.all(padded[padding] == 0)
    padded_gradients, packed_gradients = padded_pullback(cotangent), packed_pullback(cotangent)
    assert all(np.all(gradient[padding] == 0) for gradient in padded_gradients.values())
    for i, count in enumerate(lengths):
        for out, gradients, chosen in [
            (padded, padded_gradients, slice(0, count)),
            (packed, packed_gradients, slice(0, count)),
            (packed, packed_gradients, slice(count, t)),
        ]:
            if chosen.stop > chosen.start:
                q, k, v = (x[i : i + 1, chosen] for x in (p.q, p.k, p.v))
                alone, pullback = layer.vjp(q, k, v)
                o = read(softmax_weights(q, k, causal=False), v)
                size = 10 / max(length(o, 1).min(), 1e-4)
                assert_close(out[i : i + 1, chosen], alone, size=size)
                for name, gradient in pullback(cotangent[i : i + 1, chosen]).items():
                    scale = size * max(1, np.abs(gradient).max())
                    assert_close(gradients[name][i : i + 1, chosen], gradient, size=scale)


def test_axis_auto_means_tokens_for_softmax():
    p, base = RowNormalizedProblem(np.random.default_rng(0), t=5), pa.Softmax(causal=False)
    auto, token, channel = (
        pa.RowNormalized(base, axis=axis)(p.q, p.k, p.v) for axis in ("auto", "token", "channel")
    )
    np.testing.assert_array_equal(auto, token)
    assert_close(length(token), 1.0)
    assert np.abs(channel - token).max() > 0.1


# Conditioning. A is the output of attention for one head, n × e, and CA that with unit rows


def singular_values(a):
    return np.linalg.svd(a, compute_uv=False)


def kappa(a):
    return singular_values(a)[0] / singular_values(a)[-1]


def log_mu(a, norm=None):
    """log of 2/(σ₁⋯σ_k) (‖A‖_F / √k)^k, or with another number in place of ‖A‖_F."""
    sigma = singular_values(a)
    norm = np.sqrt(np.sum(a * a)) if norm is None else norm
    k = len(sigma)
    return np.log(2) - np.sum(np.log(sigma)) + k * np.log(norm / np.sqrt(k))


def mu(a):
    return np.exp(log_mu(a))


def before_and_after(q, k, v, base):
    """A and CA, from arrays of a single head and sequence."""
    arrays = [np.asarray(x)[None, :, None] for x in (q, k, v)]
    return base(*arrays)[0, :, 0], pa.RowNormalized(base, eps=0)(*arrays)[0, :, 0]


matrices = given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 9),
    e=st.integers(1, 6),
    sharpness=st.sampled_from([1.0, 4.0]),
    causal=st.booleans(),
)


def random_matrices(seed, n, e, sharpness, causal):
    rng = np.random.default_rng(seed)
    q, k = np.sqrt(sharpness) * rng.normal(size=(2, n, 8))
    v = rng.normal(size=(n, e)) * rng.uniform(0.1, 10)
    a, ca = before_and_after(q, k, v, pa.Softmax(causal=causal))
    assume(kappa(a) < 1e5)
    assume(kappa(ca) < 1e5)
    return v, a, ca


@sampled
@matrices
def test_theorem_4_2_bounds_the_condition_number(**drawn):
    """κ(A) ≤ μ(A) is true. With unit rows ‖CA‖_F = √n, so μ(CA) depends on the determinant only."""
    _, a, ca = random_matrices(**drawn)
    n, k = len(ca), min(ca.shape)
    from_rows_of_length_one = log_mu(ca, norm=np.sqrt(n))
    assert abs(log_mu(ca) - from_rows_of_length_one) <= 1e-9
    for matrix, bound in [(a, log_mu(a)), (ca, from_rows_of_length_one)]:
        assert np.log(kappa(matrix)) <= bound + 1e-9
        if k == 1:
            assert abs(bound - np.log(2)) <= 1e-9
        if k == 2:
            assert abs(np.exp(bound) / (kappa(matrix) + 1 / kappa(matrix)) - 1) <= 1e-9


@sampled
@matrices
def test_theorem_4_3_bounds_the_condition_number_by_the_values(**drawn):
    """κ(A) ≤ 2/(σ₁⋯σ_k) (√(n/k) ‖v‖_F)^k, which is true as ‖A‖_F ≤ √n ‖v‖_F for a softmax.

    Both sides are invariant under v → cv; so it does not follow, as the paper states, that
    ‖v‖_F > 1 leads to a high condition number.
    """
    v, a, _ = random_matrices(**drawn)
    bound = log_mu(a, norm=np.sqrt(len(a)) * np.sqrt(np.sum(v * v)))
    assert log_mu(a) <= bound + 1e-9
    assert np.log(kappa(a)) <= bound + 1e-9


def test_the_bound_of_theorem_4_3_equals_mu_for_a_single_value():
    q, k, v = np.full((5, 1), 60.0), np.zeros((5, 1)), np.zeros((5, 1))
    k[0], v[0] = 1, 3
    a, _ = before_and_after(q, k, v, pa.Softmax())
    bound = log_mu(a, norm=np.sqrt(5) * 3)
    assert abs(np.exp(bound) - 2) <= 1e-9
    assert abs(mu(a) - 2) <= 1e-9


@sampled
@matrices
def test_with_no_more_tokens_than_channels_mu_does_not_increase(**drawn):
    """log μ(A) − log μ(CA) = n (log RMS(r) − mean log r) ≥ 0 for n ≤ e, r being the row norms."""
    drawn["n"] = min(drawn["n"], drawn["e"])
    _, a, ca = random_matrices(**drawn)
    r = length(a)
    fall = len(a) * (np.log(np.sqrt(np.mean(r * r))) - np.mean(np.log(r)))
    assert fall >= -1e-12
    assert abs(log_mu(a) - log_mu(ca) - fall) <= 1e-8


def test_the_condition_number_may_rise_although_mu_falls():
    """The example is one of 400 seeds; κ from 437 to 531, while μ falls."""
    rng = np.random.default_rng(59)
    q, k = rng.normal(size=(2, 4, 4))
    a, ca = before_and_after(q, k, rng.normal(size=(4, 4)), pa.Softmax(causal=False))
    assert log_mu(ca) < log_mu(a) - 1
    assert kappa(ca) > 1.2 * kappa(a)


@pytest.mark.parametrize("causal", [True, False])
def test_theorem_4_4_is_false_where_tokens_outnumber_channels(causal):
    """μ(CA) ≤ μ(A) is claimed for every A; here μ rises from 2 to 3.6, and κ from 1 to √11.

    Eleven queries read the value (1, 0) and one reads (0, √11), so that A has orthogonal columns
    of equal length: κ is 1. With unit rows their lengths are √11 and 1. The softmax weights are
    exact to e⁻⁴⁰, and the example holds under a causal mask too.
    """
    k = np.array([[1.0, 0.0]] * 11 + [[0.0, 1.0]])
    v = k * np.array([1.0, np.sqrt(11)])
    a, ca = before_and_after(40 * k, k, v, pa.Softmax(scale=1.0, causal=causal))
    assert abs(kappa(a) - 1) <= 1e-9
    assert abs(mu(a) - 2) <= 1e-9
    assert abs(kappa(ca) - np.sqrt(11)) <= 1e-9
    assert abs(mu(ca) - (np.sqrt(11) + 1 / np.sqrt(11))) <= 1e-9


def test_theorem_4_4_is_false_for_smooth_weights_too():
    """Normal queries, keys and values, 12 × 2; one of 1000 seeds: κ from 1.97 to 3.59."""
    rng = np.random.default_rng(230)
    q, k = rng.normal(size=(2, 12, 2))
    v = rng.normal(size=(12, 2))
    a, ca = before_and_after(q, k, v, pa.Softmax(causal=False))
    assert kappa(ca) > 1.5 * kappa(a)
    assert mu(ca) > 1.5 * mu(a)


def test_theorem_4_4_is_false_for_most_random_heads_of_a_usual_size():
    """512 tokens, 64 channels, the usual scale, no mask: μ rises for each of these seeds."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        q, k, v = rng.normal(size=(3, 512, 64))
        a, ca = before_and_after(q, k, v, pa.Softmax(causal=False))
        assert log_mu(ca) > log_mu(a) + 0.1


# Caches


def test_the_row_norm_adds_nothing_to_the_cache():
    p = RowNormalizedProblem(np.random.default_rng(0), t=4)
    for text, stored in [("row_normalized", ["k", "v"]), ("row_normalized(laser)", ["k", "v"])]:
        cache = pa.parse(text).init_cache(p.q, p.k, p.v, capacity=4)
        assert sorted(cache.store) == stored
    with_norm, without = (
        pa.parse(text).init_cache(p.q, p.k, p.v, capacity=4).store
        for text in ("row_normalized(lucid)", "lucid")
    )
    shapes = [sorted(buffer.shape for buffer in store.values()) for store in (with_norm, without)]
    assert shapes[0] == shapes[1]


def test_channels_can_not_be_cached():
    p = RowNormalizedProblem(np.random.default_rng(0), t=4)
    with pytest.raises(ValueError, match="not causal, so it can not have a cache"):
        pa.parse(CHANNEL).init_cache(p.q, p.k, p.v, capacity=4)


# Construction


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("row_normalized(row_normalized)", "the base's rows have length 1 already"),
        ("row_normalized(lucid(row_normalized))", "the base's rows have length 1 already"),
        ("laser(row_normalized)", "laser needs a base that reads a mean of its values"),
        ("row_normalized[axis=channel]", "over all tokens, and the base is causal"),
        ("row_normalized[axis=channel](lucid)", "over all tokens, and the base is causal"),
        ("row_normalized[axis=channel](path)", "over all tokens, and the base is causal"),
    ],
)
def test_compositions_that_make_no_sense_are_refused_with_the_reason(text, reason):
    with pytest.raises(TypeError, match=rf"^{re.escape(text)} makes no sense: .*{reason}"):
        pa.parse(text)


def test_a_difference_of_unit_rows_may_be_normalised_again():
    p = RowNormalizedProblem(np.random.default_rng(0), t=4)
    layer = pa.parse("row_normalized(differential(row_normalized))")
    x = p.x(layer)
    assert_close(layer(**x), unit(layer.base(**x)))


@pytest.mark.parametrize("options", [{"eps": -1.0}, {"eps": np.inf}, {"axis": "row"}, {"axis": 1}])
def test_options_are_checked(options):
    with pytest.raises(ValueError, match=f"row_normalized: option {next(iter(options))}"):
        pa.RowNormalized(**options)


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("value", [2e38, 1e-30])
def test_rows_of_any_size_are_normalised_to_length_one(axis, value):
    o = np.full((1, 4, 1, 4), value, dtype=np.float32)
    out = pa.UnitRows(eps=0, axis=axis)(o)
    np.testing.assert_allclose(out, 0.5, rtol=1e-6)


def test_a_packed_segment_of_huge_rows_does_not_affect_its_neighbour():
    o = np.ones((1, 4, 1, 2), dtype=np.float32)
    o[:, 2:] = 1e25
    out = pa.UnitRows(axis="channel")(o, segment_ids=np.asarray([[0, 0, 1, 1]]))
    np.testing.assert_allclose(out, 0.5**0.5, rtol=1e-6)
