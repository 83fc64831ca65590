"""Softmax attention and LASER: what holds for scores and values of any size.

Softmax attention is A v, and LASER log(A eᵛ), elementwise, with the same A. Outputs and gradients
are compared in `test_definitions.py`; the identities here hold for any implementation, in float64
to 1e-10 of the largest number involved.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.attention_problems import logits
from tests.mathematics.definitions import assert_is_defined
from tests.mathematics.identities import assert_close, causal_mask, identity_values
from tests.mathematics.problems import Problem, problems

SOFTMAX, LASER = pa.Softmax(), pa.Laser()


class Bounds:
    """log A (b, h, t, s, 1), the values (b, h, 1, s, e), and `slack` for rounded intermediates."""

    def __init__(self, p):
        self.visible = causal_mask(p.q.shape[1], p.k.shape[1])
        scores = logits(p.q, p.k)
        masked = np.where(self.visible, scores, -np.inf)
        self.log_weights = (masked - np.logaddexp.reduce(masked, axis=-1)[..., None])[..., None]
        self.values = np.repeat(p.v, p.group, axis=2).transpose(0, 2, 1, 3)[:, :, None]
        self.slack = 1e-12 * (1 + np.abs(p.v).max() + np.abs(scores).max())

    def highest(self, per_key):
        """The maximum over each query's visible keys, (b, t, h, e)."""
        return np.where(self.visible[..., None], per_key, -np.inf).max(-2).transpose(0, 2, 1, 3)


hard = problems(spreads=(1, 30))


@pytest.mark.parametrize("text", ["softmax", "softmax[window=3]", "softmax[bias=true]", "laser"])
@pytest.mark.parametrize("spread", [30, 1000])
def test_scores_of_any_size_give_the_output_and_gradients_of_the_definition(text, spread):
    m, p = pa.parse(text), Problem(spread, s=9, t=7, n=2, group=2, spread=spread)
    assert_is_defined(m, p.x(m), spread)


@pytest.mark.parametrize("m", [SOFTMAX, LASER], ids=str)
@pytest.mark.parametrize("height", [50.0, 800.0, 1e5])
def test_an_enormous_score_selects_its_value_without_overflow(m, height):
    keys = np.array([0.0, 1.0, -1.0, 1.0]).reshape(1, 4, 1, 1)
    values = np.array([5.0, -2.0, 7.0, 4.0]).reshape(1, 4, 1, 1)
    out, pullback = m.vjp(np.full_like(keys, height), keys, values)
    expected = [5.0, -2.0, -2.0, 1.0 if m is SOFTMAX else np.log((np.exp(-2) + np.exp(4)) / 2)]
    assert_close(out[0, :, 0, 0], expected)
    gradients = pullback(np.ones_like(out))
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())


@given(hard)
def test_weights_are_nonnegative_zero_if_masked_and_rows_sum_to_one(p):
    weights = SOFTMAX(p.q, p.k, identity_values(p.k)).transpose(0, 2, 1, 3)
    assert np.all(weights >= 0)
    assert np.all(weights[..., ~causal_mask(*weights.shape[2:])] == 0)
    assert_close(weights.sum(-1), 1.0)


@pytest.mark.parametrize("m", [SOFTMAX, LASER], ids=str)
def test_one_token_returns_its_value(m):
    p = Problem(s=1, n=2, group=2)
    assert_close(m(p.q, p.k, p.v), np.repeat(p.v, 2, axis=2))


@pytest.mark.parametrize("text", ["softmax[bias=true]", "laser(softmax[bias=true])"])
def test_rows_that_a_bias_blinds_have_zero_output_and_gradient(text):
    m, p = pa.parse(text), Problem(s=7, t=5, n=2, group=2)
    blind = p.rng.random((2, 4, 5)) < 0.5
    bias = np.where(blind[..., None], -np.inf, p.rng.normal(size=(2, 4, 5, 7)))
    out, pullback = m.vjp(p.q, p.k, p.v, bias=bias)
    tokens = blind.transpose(0, 2, 1)
    assert np.all(out[tokens] == 0)
    seen = m(p.q, p.k, p.v, bias=np.where(blind[..., None], 0, bias))
    assert_close(out[~tokens], seen[~tokens])
    cotangent = p.like_output()
    gradients = pullback(cotangent)
    assert np.all(gradients["q"][tokens] == 0)
    assert np.all(gradients["bias"][blind] == 0)
    unheard = pullback(np.where(tokens[..., None], 0.0, cotangent))
    for name, gradient in gradients.items():
        assert np.all(np.isfinite(gradient))
        assert_close(gradient, unheard[name])


@pytest.mark.parametrize("m", [SOFTMAX, LASER], ids=str)
def test_masking_every_key_gives_zero_everywhere(m):
    p = Problem(s=5, n=2, group=2)
    out, pullback = m.vjp(p.q, p.k, p.v, key_mask=np.zeros((2, 5), dtype=bool))
    assert np.all(out == 0)
    assert not any(gradient.any() for gradient in pullback(p.like_output()).values())


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4)])
def test_a_bias_broadcasts_over_batch_and_heads_and_its_gradient_is_summed(shape):
    m, p = pa.Softmax(bias=True), Problem(s=5, t=3, n=2, group=2)
    bias = p.rng.normal(size=(*shape, 3, 5))
    out, pullback = m.vjp(p.q, p.k, p.v, bias=bias)
    full, full_pullback = m.vjp(p.q, p.k, p.v, bias=np.broadcast_to(bias, (2, 4, 3, 5)))
    assert_close(out, full)
    cotangent = p.like_output()
    summed = tuple(axis for axis in (0, 1) if shape[axis] == 1)
    expected = full_pullback(cotangent)["bias"].sum(summed, keepdims=True)
    assert_close(pullback(cotangent)["bias"], expected)


@given(hard, st.data())
def test_split_keys_merge_by_their_log_sum_exp(p, data):
    cut = data.draw(st.integers(1, max(1, p.k.shape[1] - 1)))
    parts = [part for part in (slice(cut), slice(cut, None)) if p.k[:, part].size]
    lses = [np.logaddexp.reduce(logits(p.q, p.k[:, part]), axis=-1) for part in parts]
    lses = [lse.transpose(0, 2, 1)[..., None] for lse in lses]
    total = np.logaddexp.reduce(lses, axis=0)
    size = 1 + np.abs(lses).max()
    for m in (pa.Softmax(causal=False), pa.Laser(pa.Softmax(causal=False))):
        outs = [m(p.q, p.k[:, part], p.v[:, part]) for part in parts]
        if m.name == "softmax":
            merged = np.sum(np.exp(lses - total) * outs, axis=0)
        else:
            merged = np.logaddexp.reduce(np.add(lses, outs), axis=0) - total
        assert_close(merged, m(p.q, p.k, p.v), size=size)


# LASER


@pytest.mark.parametrize("causal", [True, False])
def test_values_hundreds_apart_give_finite_and_exact_outputs(causal):
    m, p = pa.Laser(pa.Softmax(causal=causal)), Problem(s=9, t=7, n=2, group=2)
    v = p.v + p.rng.choice([-700.0, -300.0, 0.0, 300.0, 700.0], size=p.v.shape)
    assert_is_defined(m, p.x(m, v=v), 10)


@pytest.mark.parametrize("height", [40.0, 90.0, 130.0, 300.0, 700.0, 5000.0])
@pytest.mark.parametrize("score_height", [0.5, 1.0, 1.5])
def test_opposing_spikes_of_scores_and_values_stay_exact(height, score_height):
    """The largest value has the smallest weight and vice versa: 0·1 + 1·0 in floating point."""
    p = Problem(s=8, n=2, group=2)
    spike = np.where(np.arange(8) % 3 == 1, height, 0.0)[:, None, None]
    p.v = p.v + spike
    p.q[..., 0] = np.sqrt(3)
    p.k[..., 0] = -score_height * spike[..., 0]
    assert_is_defined(LASER, p.x(LASER), 10)


@given(hard)
def test_output_lies_between_the_best_weighted_value_and_log_n_above_it(p):
    of, out = Bounds(p), LASER(p.q, p.k, p.v)
    best = of.highest(of.log_weights + of.values)
    assert np.all(best - of.slack <= out)
    assert np.all(out <= best + np.log(of.visible.sum(-1))[:, None, None] + of.slack)
    assert np.all(SOFTMAX(p.q, p.k, p.v) - of.slack <= out)
    assert np.all(out <= of.highest(of.values) + of.slack)


@given(hard, st.floats(1e-3, 1))
def test_small_values_give_attention_within_hoeffding(p, epsilon):
    of = Bounds(p)
    excess = LASER(p.q, p.k, epsilon * p.v) / epsilon - SOFTMAX(p.q, p.k, p.v)
    spread = of.highest(of.values) + of.highest(-of.values)
    assert np.all(excess >= -of.slack / epsilon)
    assert np.all(excess <= epsilon * spread**2 / 8 + of.slack / epsilon)


@given(hard, st.floats(1, 1e6))
def test_large_values_give_the_largest_visible_within_its_log_weight(p, factor):
    of = Bounds(p)
    out = LASER(p.q, p.k, factor * p.v) / factor
    assert np.all(out <= of.highest(of.values) + of.slack)
    assert np.all(out >= of.highest(of.values + of.log_weights / factor) - of.slack)


@given(hard, st.floats(0, 1), st.sampled_from([1e-6, 1.0, 1e3]))
def test_output_is_convex_and_monotone_in_the_values_and_changes_no_more_than_they(p, share, size):
    of, w = Bounds(p), p.rng.permuted(p.v, axis=1)
    out = LASER(p.q, p.k, p.v)
    chord = share * out + (1 - share) * LASER(p.q, p.k, w)
    assert np.all(LASER(p.q, p.k, share * p.v + (1 - share) * w) <= chord + of.slack)
    step, slack = size * p.rng.uniform(-1, 1, size=p.v.shape), of.slack + 1e-12 * size
    assert np.abs(LASER(p.q, p.k, p.v + step) - out).max() <= np.abs(step).max() + slack
    assert np.all(LASER(p.q, p.k, p.v + np.abs(step)) >= out - slack)


def test_a_value_that_all_channels_share_acts_as_a_bias():
    """log(A e^(r+v)) = log(A e^r) + log(A' e^v), A' being A with the bias r."""
    p = Problem(s=7, t=5, n=2, group=2)
    shared = p.v[..., :1]
    r = np.repeat(shared[..., 0], p.group, axis=2).transpose(0, 2, 1)[:, :, None]
    bias = np.broadcast_to(r, (2, 4, 5, 7)).copy()
    biased = pa.Laser(pa.Softmax(bias=True))(p.q, p.k, p.v, bias=bias)
    assert_close(LASER(p.q, p.k, shared + p.v), LASER(p.q, p.k, shared) + biased, size=10)


@pytest.mark.parametrize("height", [120.0, 1e3, 1e5])
def test_a_peak_in_the_future_costs_past_outputs_and_gradients_no_accuracy(height):
    p = Problem(s=8)
    v = p.v.copy()
    v[:, 5:] += height
    (out, pullback), (plain, plain_pullback) = LASER.vjp(p.q, p.k, v), LASER.vjp(p.q, p.k, p.v)
    assert_close(out[:, :5], plain[:, :5])
    cotangent = p.like_output()
    cotangent[:, 5:] = 0
    expected = plain_pullback(cotangent)
    for name, gradient in pullback(cotangent).items():
        assert_close(gradient, expected[name])


def test_the_gradient_of_values_for_one_output_is_a_distribution_over_its_visible_keys():
    p = Problem(s=7, t=5, n=2, group=2)
    cotangent = np.zeros_like(p.like_output())
    cotangent[1, 2, 3, 1] = 1
    dv = LASER.vjp(p.q, p.k, p.v)[1](cotangent)["v"]
    weights = dv[1, :, 1, 1].copy()
    assert np.all(weights >= 0)
    assert np.all(weights[5:] == 0)
    assert_close(weights.sum(), 1.0)
    dv[1, :, 1, 1] = 0
    assert np.all(dv == 0)
