"""LASER against identities that hold for any implementation.

The definition is o = log(A e^v), elementwise, with A the matrix of softmax attention; the tests
take it as o_ic = LSE_j(score_ij + v_jc) − LSE_j(score_ij) over the visible keys. Everything is
float64, and an identity has to hold to 1e-10 of the largest number involved.
"""

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


class LaserProblem(AttentionProblem):
    """`size` bounds the scores and values whose rounding enters an output."""

    def __init__(self, rng, **sizes):
        super().__init__(rng, **sizes)
        self.size = 1 + np.abs(self.v).max() + np.abs(logits(self.q, self.k)).max()

    @property
    def layer(self):
        return pa.Laser(self.base)

    @property
    def biased(self):
        return pa.Laser(self.biased_base)


problems = partial(
    attention_problems, LaserProblem, spreads=(1.0, 30.0), heights=(1.0, 10.0, 300.0)
)


def laser_by_rows(q, k, v, visible, bias=None):
    """The output, row by row over the visible keys only; rows without one give 0."""
    s = logits(q, k, bias)
    v = np.repeat(v, q.shape[2] // v.shape[2], axis=2)
    out, visible = np.zeros((*q.shape[:3], v.shape[-1])), np.broadcast_to(visible, s.shape)
    for b, h, i in np.ndindex(s.shape[:3]):
        row_mask = visible[b, h, i]
        if row_mask.any():
            row, values = s[b, h, i, row_mask], v[b, row_mask, h]
            out[b, i, h] = np.logaddexp.reduce(row[:, None] + values, axis=0)
            out[b, i, h] -= np.logaddexp.reduce(row)
    return out


def log_weights(q, k, visible):
    """log A, (b, h, t, s); −inf where a key is masked."""
    masked = np.where(visible, logits(q, k), -np.inf)
    return masked - np.logaddexp.reduce(masked, axis=-1)[..., None]


def values_per_key(p):
    """The values broadcast for queries and keys: (b, h, 1, s, e)."""
    return np.repeat(p.v, p.group, axis=2).transpose(0, 2, 1, 3)[:, :, None]


def posterior(p, out):
    """w_ijc = a_ij exp(v_jc − o_ic) of shape (b, h, t, s, e)."""
    weights = log_weights(p.q, p.k, p.visible)[..., None]
    return np.exp(weights + values_per_key(p) - out.transpose(0, 2, 1, 3)[:, :, :, None])


def highest_visible(p, per_key):
    """The maximum over each query's visible keys of `per_key`, (b, h, t or 1, s, e)."""
    highest = np.where(p.visible[..., None], per_key, -np.inf).max(-2)
    return highest.transpose(0, 2, 1, 3)


# The definition


@sampled
@given(problems())
def test_output_is_the_log_sum_exp_of_scores_and_values(p):
    expected = laser_by_rows(p.q, p.k, p.v, p.visible, p.bias)
    assert_close(p.biased(p.q, p.k, p.v, bias=p.bias), expected, size=p.size)
    assert_close(p.layer(p.q, p.k, p.v), laser_by_rows(p.q, p.k, p.v, p.visible), size=p.size)


@sampled
@given(problems())
def test_output_is_the_log_of_attention_over_exponentials(p):
    v = p.v / np.abs(p.v).max()
    expected = np.log(p.base(p.q, p.k, np.exp(v)))
    assert_close(p.layer(p.q, p.k, v), expected, size=p.size)


def test_one_token_returns_its_value():
    p = LaserProblem(np.random.default_rng(1), t=1, s=1, n=2, group=2)
    assert_close(p.layer(p.q, p.k, p.v), np.repeat(p.v, 2, axis=2), size=p.size)


@sampled
@given(problems())
def test_values_hundreds_apart_give_finite_and_exact_outputs(p):
    heights = p.rng.choice([-700.0, -300.0, 0.0, 300.0, 700.0], size=p.v.shape)
    v = p.v + heights
    out = p.layer(p.q, p.k, v)
    assert_close(out, laser_by_rows(p.q, p.k, v, p.visible), size=p.size + 700)


# Shift, bounds and limits


@sampled
@given(problems(), st.floats(-1e3, 1e3))
def test_a_constant_added_to_the_values_is_added_to_the_output(p, size):
    shift = size * p.rng.normal(size=p.v.shape[-1])
    out = p.layer(p.q, p.k, p.v)
    size = p.size + np.abs(shift).max()
    assert_close(p.layer(p.q, p.k, p.v + shift), out + shift, size=size)


@sampled
@given(problems(), st.floats(-1e3, 1e3))
def test_a_constant_value_is_returned(p, value):
    out = p.layer(p.q, p.k, np.full_like(p.v, value))
    assert_close(out, value, size=p.size + abs(value))


@sampled
@given(problems())
def test_adding_one_vector_to_all_keys_changes_nothing(p):
    out = p.layer(p.q, p.k, p.v)
    shift = p.rng.normal(size=3)
    size = p.size + np.abs(p.q @ shift).max()
    assert_close(p.layer(p.q, p.k + shift, p.v), out, size=size)


@sampled
@given(problems())
def test_output_lies_within_log_n_above_the_best_weighted_value(p):
    weighted = log_weights(p.q, p.k, p.visible)[..., None] + values_per_key(p)
    best = highest_visible(p, weighted)
    slack = 1e-12 * p.size
    out = p.layer(p.q, p.k, p.v)
    visible_count = p.visible.sum(-1)[:, None, None]
    assert np.all(best - slack <= out)
    assert np.all(out <= best + np.log(visible_count) + slack)


@sampled
@given(problems())
def test_output_lies_between_the_mean_and_the_largest_visible_value(p):
    slack = 1e-12 * p.size
    out = p.layer(p.q, p.k, p.v)
    assert np.all(p.base(p.q, p.k, p.v) - slack <= out)
    assert np.all(out <= highest_visible(p, values_per_key(p)) + slack)


@sampled
@given(problems(), st.floats(1e-3, 1))
def test_small_values_give_attention_within_hoeffding(p, epsilon):
    v = p.v / np.abs(p.v).max()
    spread = highest_visible(p, values_per_key(p)) + highest_visible(p, -values_per_key(p))
    spread = spread / np.abs(p.v).max()
    excess = p.layer(p.q, p.k, epsilon * v) / epsilon - p.base(p.q, p.k, v)
    slack = 1e-13 * p.size / epsilon
    assert np.all(excess >= -slack)
    assert np.all(excess <= epsilon * spread**2 / 8 + slack)


@sampled
@given(problems(), st.floats(1, 1e6))
def test_large_values_give_the_largest_visible_within_its_log_weight(p, factor):
    v = values_per_key(p) / np.abs(p.v).max()
    largest = highest_visible(p, v)
    weighted = factor * v + log_weights(p.q, p.k, p.visible)[..., None]
    floor = highest_visible(p, weighted) / factor
    out = p.layer(p.q, p.k, factor * p.v / np.abs(p.v).max()) / factor
    slack = 1e-12 * p.size
    assert np.all(out <= largest + slack)
    assert np.all(out >= floor - slack)


@sampled
@given(problems(), st.floats(0, 1))
def test_output_is_convex_in_the_values(p, share):
    w = p.rng.permuted(p.v, axis=1)
    between = p.layer(p.q, p.k, share * p.v + (1 - share) * w)
    chord = share * p.layer(p.q, p.k, p.v) + (1 - share) * p.layer(p.q, p.k, w)
    assert np.all(between <= chord + 1e-12 * p.size)


@sampled
@given(problems(), st.sampled_from([1e-6, 1.0, 1e3]))
def test_output_is_monotone_in_the_values_and_changes_by_at_most_their_largest_change(p, size):
    step = size * p.rng.uniform(-1, 1, size=p.v.shape)
    slack = 1e-12 * (p.size + size)
    out = p.layer(p.q, p.k, p.v)
    moved = p.layer(p.q, p.k, p.v + step)
    assert np.abs(moved - out).max() <= np.abs(step).max() + slack
    assert np.all(p.layer(p.q, p.k, p.v + np.abs(step)) >= out - slack)


@sampled
@given(problems())
def test_a_value_that_all_channels_share_acts_as_a_bias(p):
    """log(A e^(r+v)) = log(A e^r) + log(A' e^v), A' being A with the bias r."""
    shared = p.v[..., :1]
    r = np.repeat(shared[..., 0], p.group, axis=2).transpose(0, 2, 1)[:, :, None]
    biased = p.biased(p.q, p.k, p.v, bias=np.broadcast_to(r, p.bias.shape).copy())
    together = p.layer(p.q, p.k, shared + p.v)
    assert_close(together, p.layer(p.q, p.k, shared) + biased, size=2 * p.size)


# Masks, heads and time


@sampled
@given(problems(square=True, causal=True), st.integers(1, 9), st.sampled_from([1000.0, 1e6]))
def test_no_future_value_changes_a_bit_of_past_outputs(p, past, height):
    v = p.v.copy()
    v[:, past:] += height
    out, changed = p.layer(p.q, p.k, p.v), p.layer(p.q, p.k, v)
    np.testing.assert_array_equal(changed[:, :past], out[:, :past])


@sampled
@given(problems(square=True, causal=True), st.integers(1, 9))
def test_no_future_query_or_key_changes_a_bit_of_past_outputs(p, past):
    q, k = p.q.copy(), p.k.copy()
    q[:, past:] += 1000
    k[:, past:] += 1000
    out, changed = p.layer(p.q, p.k, p.v), p.layer(q, k, p.v)
    np.testing.assert_array_equal(changed[:, :past], out[:, :past])


@pytest.mark.parametrize("height", [120.0, 1e3, 1e5])
def test_a_peak_in_the_future_costs_past_outputs_and_gradients_no_accuracy(height):
    p = LaserProblem(np.random.default_rng(0), t=8, s=8)
    v = p.v.copy()
    v[:, 5:] += height
    out, pullback = p.layer.vjp(p.q, p.k, v)
    assert_close(out[:, :5], laser_by_rows(p.q, p.k, p.v, p.visible)[:, :5], size=p.size)
    cotangent = p.like_output()
    cotangent[:, 5:] = 0
    _, plain_pullback = p.layer.vjp(p.q, p.k, p.v)
    plain = plain_pullback(cotangent)
    for name, gradient in pullback(cotangent).items():
        assert_close(gradient, plain[name])


@sampled
@given(problems(causal=False), st.data())
def test_split_keys_merge_by_logaddexp(p, data):
    cut = data.draw(st.integers(1, max(1, p.k.shape[1] - 1)))
    parts = [part for part in (slice(cut), slice(cut, None)) if p.k[:, part].size]
    lses = [np.logaddexp.reduce(logits(p.q, p.k[:, part]), axis=-1) for part in parts]
    lses = [lse.transpose(0, 2, 1)[..., None] for lse in lses]
    outs = [p.layer(p.q, p.k[:, part], p.v[:, part]) for part in parts]
    joint = [lse + out for lse, out in zip(lses, outs, strict=True)]
    merged = np.logaddexp.reduce(joint, axis=0) - np.logaddexp.reduce(lses, axis=0)
    assert_close(merged, p.layer(p.q, p.k, p.v), size=p.size)


@sampled
@given(problems(causal=False))
def test_order_of_keys_does_not_matter_without_causality(p):
    order = p.rng.permutation(p.k.shape[1])
    out = p.layer(p.q, p.k, p.v)
    assert_close(p.layer(p.q, p.k[:, order], p.v[:, order]), out, size=p.size)


@sampled
@given(problems())
def test_rows_without_a_visible_key_have_zero_output_and_zero_gradient(p):
    blind = p.rng.random(p.bias.shape[:3]) < 0.5
    bias = np.where(blind[..., None], -np.inf, p.bias)
    out, pullback = p.biased.vjp(p.q, p.k, p.v, bias=bias)
    blind_tokens = blind.transpose(0, 2, 1)
    assert np.all(out[blind_tokens] == 0)
    expected = laser_by_rows(p.q, p.k, p.v, p.visible & ~blind[..., None], p.bias)
    assert_close(out, expected, size=p.size)
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
def test_masking_keys_equals_deleting_them_even_when_they_are_nan(p):
    mask = p.rng.random(p.k.shape[1]) < 0.6
    expected = laser_by_rows(p.q, p.k, p.v, p.visible & mask)
    k, v = (np.where(mask[:, None, None], x, np.nan) for x in (p.k, p.v))
    out, pullback = p.layer.vjp(p.q, k, v, key_mask=np.tile(mask, (len(k), 1)))
    assert_close(out, expected, size=p.size)
    gradients = pullback(p.like_output())
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())
    assert np.all(gradients["k"][:, ~mask] == 0)
    assert np.all(gradients["v"][:, ~mask] == 0)


# Gradients


@sampled
@given(problems())
def test_the_gradient_of_values_has_the_sum_of_the_cotangent_in_each_channel(p):
    _, pullback = p.layer.vjp(p.q, p.k, p.v)
    cotangent = p.like_output()
    received = grouped(cotangent, p.group).sum((1, 3))
    assert_close(pullback(cotangent)["v"].sum(1), received, size=np.abs(cotangent).max())


@sampled
@given(problems(), st.data())
def test_the_gradient_of_values_for_one_output_is_a_distribution_over_its_visible_keys(p, data):
    b, i, h, c = (data.draw(st.integers(0, size - 1)) for size in p.like_output().shape)
    _, pullback = p.layer.vjp(p.q, p.k, p.v)
    cotangent = np.zeros_like(p.like_output())
    cotangent[b, i, h, c] = 1
    dv = pullback(cotangent)["v"]
    weights = dv[b, :, h // p.group, c].copy()
    assert np.all(weights >= 0)
    assert np.all(weights[~p.visible[i]] == 0)
    assert_close(weights.sum(), 1.0)
    dv[b, :, h // p.group, c] = 0
    assert np.all(dv == 0)


def closed_form_gradients(p, out, cotangent):
    """dq, dk, dv from the posterior w: dscore_ij = Σ_c dO_ic (w_ijc − a_ij)."""
    w = posterior(p, out)
    a = np.exp(log_weights(p.q, p.k, p.visible))[..., None]
    dscores = np.einsum("bthe,bhtse->bhts", cotangent, w - a) / np.sqrt(3)
    dq = np.einsum("bhts,bshd->bthd", dscores, np.repeat(p.k, p.group, axis=2))
    dk = np.einsum("bhts,bthd->bshd", dscores, p.q)
    dv = np.einsum("bthe,bhtse->bshe", cotangent, w)
    return {"q": dq, "k": grouped(dk, p.group).sum(3), "v": grouped(dv, p.group).sum(3)}


@sampled
@given(problems())
def test_gradients_are_those_of_the_closed_form_by_the_posterior(p):
    out, pullback = p.layer.vjp(p.q, p.k, p.v)
    cotangent = p.like_output()
    expected = closed_form_gradients(p, out, cotangent)
    size = max(1, np.abs(p.q).max()) * np.abs(cotangent).max()
    for name, gradient in pullback(cotangent).items():
        assert_close(gradient, expected[name], size=size)


@sampled
@given(problems())
def test_key_gradients_cancel_because_a_common_shift_is_neutral(p):
    _, pullback = p.layer.vjp(p.q, p.k, p.v)
    cotangent = p.like_output()
    gradients = pullback(cotangent)
    size = max(1, np.abs(p.q).max()) * np.abs(cotangent).sum()
    assert_close(gradients["k"].sum(1), 0.0, size=size)
    assert_close(np.sum(p.q * gradients["q"]), np.sum(p.k * gradients["k"]), size=size)


@pytest.mark.parametrize("height", [40.0, 90.0, 130.0, 300.0, 700.0, 5000.0])
@pytest.mark.parametrize("score_height", [0.5, 1.0, 1.5])
def test_opposing_spikes_of_scores_and_values_stay_exact(height, score_height):
    """The largest value has the smallest weight and vice versa: 0·1 + 1·0 in floating point."""
    p = LaserProblem(np.random.default_rng(0), t=8, s=8, n=2, group=2)
    spike = np.where(np.arange(8) % 3 == 1, height, 0.0)[:, None, None]
    p.v = p.v + spike
    p.q[..., 0] = np.sqrt(3)
    p.k[..., 0] = -score_height * spike[..., 0]
    p.size = 3 * height
    out, pullback = p.layer.vjp(p.q, p.k, p.v)
    assert_close(out, laser_by_rows(p.q, p.k, p.v, p.visible), size=p.size)
    cotangent = p.like_output()
    expected = closed_form_gradients(p, out, cotangent)
    for name, gradient in pullback(cotangent).items():
        assert np.all(np.isfinite(gradient))
        assert_close(gradient, expected[name], size=max(1, np.abs(expected[name]).max()))
