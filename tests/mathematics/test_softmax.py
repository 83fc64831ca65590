"""Softmax attention and LASER: what holds for scores and values of any size.

Softmax attention is A v, and LASER log(A eᵛ), elementwise, with the same A. Outputs and gradients
are compared in `test_definitions.py`; the identities here hold for any implementation, in float64
to 1e-10 of the largest number involved.
"""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.definitions import assert_is_defined
from tests.mathematics.identities import assert_close
from tests.mathematics.problems import Problem

SOFTMAX, LASER = pa.Softmax(), pa.Laser()


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


@pytest.mark.parametrize(
    "text", ["laser", "laser(softmax[causal=false])", "differential[per=token](laser)"]
)
def test_values_hundreds_apart_give_finite_and_exact_outputs(text):
    m, p = pa.parse(text), Problem(s=9, t=7, n=2, group=2)
    v = p.v + p.rng.choice([-700.0, -300.0, 0.0, 300.0, 700.0], size=p.v.shape)
    assert_is_defined(m, p.x(m, v=v), 10)


@pytest.mark.parametrize("height", [40.0, 130.0, 700.0, 5000.0])
@pytest.mark.parametrize("score_height", [0.5, 1.5])
def test_opposing_spikes_of_scores_and_values_stay_exact(height, score_height):
    """The largest value has the smallest weight and vice versa: 0·1 + 1·0 in floating point."""
    p = Problem(s=8, n=2, group=2)
    spike = np.where(np.arange(8) % 3 == 1, height, 0.0)[:, None, None]
    p.v = p.v + spike
    p.q[..., 0] = np.sqrt(3)
    p.k[..., 0] = -score_height * spike[..., 0]
    assert_is_defined(LASER, p.x(LASER), 10)


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
