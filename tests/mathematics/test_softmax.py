"""Softmax attention against identities that hold for any implementation.

The definition is A = softmax over the visible keys of (scale · q kᵀ + bias), output A v. Everything
is float64, and an identity has to hold to 1e-10 of the largest number involved.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.attention_problems import AttentionProblem, attention_problems, logits
from tests.mathematics.identities import assert_close, grouped

sampled = settings(
    max_examples=25, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)


class SoftmaxProblem(AttentionProblem):
    """The attention of the problem, with and without its bias."""

    @property
    def plain(self):
        return self.base

    @property
    def biased(self):
        return self.biased_base


problems = partial(attention_problems, SoftmaxProblem, spreads=(1.0, 30.0, 1000.0))


def online_softmax(row, values, tile):
    """One row's output and log-sum-exp, tile by tile: running maximum, sum and output."""
    maximum, total, accumulated = -np.inf, 0.0, np.zeros(values.shape[-1])
    for start in range(0, len(row), tile):
        part = row[start : start + tile]
        new_maximum = max(maximum, part.max())
        weights, shrink = np.exp(part - new_maximum), np.exp(maximum - new_maximum)
        total = shrink * total + weights.sum()
        accumulated = shrink * accumulated + weights @ values[start : start + tile]
        maximum = new_maximum
    return accumulated / total, maximum + np.log(total)


def online_attention(q, k, v, visible, bias=None, scale=None, tile=3):
    """Output and log-sum-exp, row by row over the visible keys only; rows without one give 0."""
    s = logits(q, k, bias, scale)
    v = np.repeat(v, q.shape[2] // v.shape[2], axis=2)
    out, lse = np.zeros((*q.shape[:3], v.shape[-1])), np.full(s.shape[:3], -np.inf)
    visible = np.broadcast_to(visible, s.shape)
    for b, h, i in np.ndindex(s.shape[:3]):
        row_mask = visible[b, h, i]
        if row_mask.any():
            row, values = s[b, h, i, row_mask], v[b, row_mask, h]
            out[b, i, h], lse[b, h, i] = online_softmax(row, values, tile)
    return out, lse


def weights_of(mechanism, q, k, **named):
    """The matrix A, (b, h, t, s): the output for identity values."""
    b, s, n, _ = k.shape
    identity = np.broadcast_to(np.eye(s)[:, None], (b, s, n, s)).copy()
    return mechanism(q, k, identity, **named).transpose(0, 2, 1, 3)


@sampled
@given(problems(), st.integers(1, 10))
def test_tiled_online_form_gives_the_same_output(p, tile):
    expected, _ = online_attention(p.q, p.k, p.v, p.visible, p.bias, tile=tile)
    assert_close(p.biased(p.q, p.k, p.v, bias=p.bias), expected)


@sampled
@given(problems(), st.floats(0.01, 10))
def test_scale_multiplies_the_scores_and_defaults_to_one_over_root_d(p, scale):
    expected, _ = online_attention(p.q, p.k, p.v, p.visible, scale=scale)
    assert_close(replace(p.plain, scale=scale)(p.q, p.k, p.v), expected)
    assert_close(p.plain(np.sqrt(3) * scale * p.q, p.k, p.v), expected)


@sampled
@given(problems())
def test_weights_are_nonnegative_zero_if_masked_and_rows_sum_to_one(p):
    weights = weights_of(p.biased, p.q, p.k, bias=p.bias)
    assert np.all(weights >= 0)
    assert np.all(weights[..., ~p.visible] == 0)
    assert_close(weights.sum(-1), 1.0)
    assert_close(p.biased(p.q, p.k, np.ones_like(p.v), bias=p.bias), 1.0)


@sampled
@given(problems(), st.floats(-1e3, 1e3))
def test_a_constant_added_to_the_values_is_added_to_the_output(p, size):
    shift = size * p.rng.normal(size=p.v.shape[-1])
    out = p.plain(p.q, p.k, p.v)
    assert_close(p.plain(p.q, p.k, p.v + shift), out + shift)


@sampled
@given(problems(), st.floats(-1e3, 1e3))
def test_shifting_a_row_of_scores_by_its_bias_changes_nothing(p, size):
    shift = size * p.rng.normal(size=(*p.bias.shape[:3], 1))
    out = p.biased(p.q, p.k, p.v, bias=p.bias)
    assert_close(p.biased(p.q, p.k, p.v, bias=p.bias + shift), out, size=max(1, abs(size)))


@sampled
@given(problems())
def test_adding_one_vector_to_all_keys_changes_nothing(p):
    out = p.plain(p.q, p.k, p.v)
    moved = p.plain(p.q, p.k + p.rng.normal(size=3), p.v)
    assert_close(moved, out, size=np.abs(p.q).max())


@sampled
@given(problems(causal=False))
def test_order_of_keys_does_not_matter_without_causality(p):
    order = p.rng.permutation(p.k.shape[1])
    mask = p.rng.random(p.k.shape[:2]) < 0.7
    out = p.biased(p.q, p.k, p.v, bias=p.bias, key_mask=mask)
    permuted = p.biased(
        p.q, p.k[:, order], p.v[:, order], bias=p.bias[..., order], key_mask=mask[:, order]
    )
    assert_close(permuted, out)


def test_order_of_keys_matters_with_causality():
    p = SoftmaxProblem(np.random.default_rng(0), t=4, s=4)
    assert not np.allclose(p.plain(p.q, p.k[:, ::-1], p.v[:, ::-1]), p.plain(p.q, p.k, p.v))


@sampled
@given(problems(causal=True))
def test_causality_and_window_equal_an_explicit_mask(p):
    explicit = np.where(p.visible, p.bias, -np.inf)
    masked = pa.Softmax(causal=False, bias=True)(p.q, p.k, p.v, bias=explicit)
    assert_close(p.biased(p.q, p.k, p.v, bias=p.bias), masked)


@pytest.mark.parametrize("window", [1, 2, 3, 7, 20])
def test_a_window_covers_exactly_the_last_tokens(window):
    t = 7
    zeros = np.zeros((1, t, 1, 2))
    weights = weights_of(pa.Softmax(window=window), zeros, zeros)[0, 0]
    for i in range(t):
        visible_count = min(i + 1, window)
        expected = np.zeros(t)
        expected[i + 1 - visible_count : i + 1] = 1 / visible_count
        assert_close(weights[i], expected)


@sampled
@given(problems())
def test_rows_without_a_visible_key_have_zero_output_and_zero_gradient(p):
    blind = p.rng.random(p.bias.shape[:3]) < 0.5
    bias = np.where(blind[..., None], -np.inf, p.bias)
    out, pullback = p.biased.vjp(p.q, p.k, p.v, bias=bias)
    blind_tokens = blind.transpose(0, 2, 1)
    assert np.all(out[blind_tokens] == 0)
    expected, _ = online_attention(p.q, p.k, p.v, p.visible & ~blind[..., None], p.bias)
    assert_close(out, expected)
    cotangent = p.like_output()
    gradients = pullback(cotangent)
    assert np.all(gradients["q"][blind_tokens] == 0)
    assert np.all(gradients["bias"][blind] == 0)
    unheard = pullback(np.where(blind_tokens[..., None], 0.0, cotangent))
    for name, gradient in gradients.items():
        assert np.all(np.isfinite(gradient))
        assert_close(gradient, unheard[name])


@sampled
@given(problems())
def test_masking_every_key_gives_zero_everywhere(p):
    no_key = np.zeros(p.k.shape[:2], dtype=bool)
    out, pullback = p.plain.vjp(p.q, p.k, p.v, key_mask=no_key)
    assert np.all(out == 0)
    for gradient in pullback(p.like_output()).values():
        assert np.all(gradient == 0)


@sampled
@given(problems(windows=False))
def test_masking_keys_equals_deleting_them_even_when_they_are_nan(p):
    mask = p.rng.random(p.k.shape[1]) < 0.6
    visible = p.visible & mask
    expected, _ = online_attention(p.q, p.k, p.v, visible)
    k, v = (np.where(mask[:, None, None], x, np.nan) for x in (p.k, p.v))
    out, pullback = p.plain.vjp(p.q, k, v, key_mask=np.tile(mask, (len(k), 1)))
    assert_close(out, expected)
    gradients = pullback(p.like_output())
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())
    assert np.all(gradients["k"][:, ~mask] == 0)
    assert np.all(gradients["v"][:, ~mask] == 0)


@sampled
@given(problems(square=True), st.integers(0, 9))
def test_each_segment_gives_the_output_of_a_call_of_its_own(p, border):
    t = p.q.shape[1]
    ids = np.tile(np.arange(t) >= border, (2, 1)).astype(int)
    out = p.plain(p.q, p.k, p.v, segment_ids=ids)
    for part in (slice(0, min(border, t)), slice(min(border, t), t)):
        if part.stop > part.start:
            assert_close(out[:, part], p.plain(p.q[:, part], p.k[:, part], p.v[:, part]))


@sampled
@given(problems(causal=False), st.data())
def test_split_keys_merge_by_their_log_sum_exp(p, data):
    cut = data.draw(st.integers(1, max(1, p.k.shape[1] - 1)))
    parts = [part for part in (slice(cut), slice(cut, None)) if p.k[:, part].size]
    outs = [p.plain(p.q, p.k[:, part], p.v[:, part]) for part in parts]
    lses = [np.logaddexp.reduce(logits(p.q, p.k[:, part]), axis=-1) for part in parts]
    shares = np.exp(lses - np.logaddexp.reduce(lses, axis=0)).transpose(0, 1, 3, 2)[..., None]
    assert_close(np.sum(shares * outs, axis=0), p.plain(p.q, p.k, p.v))


@sampled
@given(problems())
def test_the_gradient_of_values_is_the_adjoint_and_has_the_sum_of_the_cotangent(p):
    out, pullback = p.plain.vjp(p.q, p.k, p.v)
    cotangent = p.like_output()
    dv = pullback(cotangent)["v"]
    assert_close(np.sum(cotangent * out), np.sum(dv * p.v), size=np.sum(np.abs(cotangent * out)))
    received = grouped(cotangent, p.group).sum((1, 3))
    assert_close(dv.sum(1), received, size=np.abs(cotangent).max())


@sampled
@given(problems())
def test_score_gradient_is_the_weight_times_the_centred_return(p):
    out, pullback = p.biased.vjp(p.q, p.k, p.v, bias=p.bias)
    cotangent = p.like_output()
    gradients = pullback(cotangent)
    weights = weights_of(p.biased, p.q, p.k, bias=p.bias)
    k, v = (np.repeat(x, p.group, axis=2) for x in (p.k, p.v))
    returns = np.einsum("bthe,bshe->bhts", cotangent, v)
    mean_return = np.sum(cotangent * out, axis=-1).transpose(0, 2, 1)[..., None]
    dscores = weights * (returns - mean_return)
    size = np.abs(weights * returns).max()
    assert_close(gradients["bias"], dscores, size=size)
    assert_close(gradients["bias"].sum(-1), 0.0, size=size)
    assert_close(gradients["q"], np.einsum("bhts,bshd->bthd", dscores, k) / np.sqrt(3), size=size)
    dk = np.einsum("bhts,bthd->bshd", dscores, p.q) / np.sqrt(3)
    assert_close(gradients["k"], grouped(dk, p.group).sum(3), size=size * np.abs(p.q).max())


@sampled
@given(problems())
def test_key_gradients_cancel_because_a_common_shift_is_neutral(p):
    _, pullback = p.plain.vjp(p.q, p.k, p.v)
    gradients = pullback(p.like_output())
    size = max(np.abs(p.q).max(), np.abs(gradients["k"]).max())
    assert_close(gradients["k"].sum(1), 0.0, size=size)
    assert_close(np.sum(p.q * gradients["q"]), np.sum(p.k * gradients["k"]), size=size)


@pytest.mark.parametrize("height", [50.0, 800.0, 1e5])
def test_an_enormous_score_selects_its_value_without_overflow(height):
    keys = np.array([0.0, 1.0, -1.0, 1.0]).reshape(1, 4, 1, 1)
    values = np.array([5.0, -2.0, 7.0, 4.0]).reshape(1, 4, 1, 1)
    out, pullback = pa.Softmax().vjp(np.full_like(keys, height), keys, values)
    assert_close(out[0, :, 0, 0], [5.0, -2.0, -2.0, 1.0])
    gradients = pullback(np.ones_like(out))
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())


def test_one_token_returns_its_value():
    p = SoftmaxProblem(np.random.default_rng(1), t=1, s=1, n=2, group=2)
    np.testing.assert_array_equal(p.plain(p.q, p.k, p.v), np.repeat(p.v, 2, axis=2))


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_a_bias_broadcasts_over_batch_and_heads_and_its_gradient_is_summed(shape):
    p = SoftmaxProblem(np.random.default_rng(2), t=3, s=5, n=2, group=2)
    bias = p.rng.normal(size=(*shape, 3, 5))
    out, pullback = p.biased.vjp(p.q, p.k, p.v, bias=bias)
    full, full_pullback = p.biased.vjp(p.q, p.k, p.v, bias=np.broadcast_to(bias, (2, 4, 3, 5)))
    assert_close(out, full)
    cotangent = p.like_output()
    summed = tuple(axis for axis in (0, 1) if shape[axis] == 1)
    expected = full_pullback(cotangent)["bias"].sum(summed, keepdims=True)
    assert_close(pullback(cotangent)["bias"], expected)
