"""Rows of attention without a visible key, or of padded queries, with large entries elsewhere."""

import numpy as np
import pytest

import precondattn as pa

B, S, D = 2, 6, 4
MASK = np.asarray([[False, False, True, True, True, True], [False, True, True, True, True, True]])
BACKEND = "portable"


def inputs(*, b=B, t=S, s=S):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(b, tokens, 2, D)) for tokens in (t, s, s))
    return q, k, v


@pytest.mark.parametrize(("value", "sink"), [(np.inf, False), (np.nan, True)])
def test_an_infinite_cotangent_of_a_row_without_keys_reaches_no_gradient(value, sink):
    mechanism = pa.Softmax(sink=sink)
    more = {"sink": np.asarray([0.5, -0.5])} if sink else {}
    _, pullback = mechanism.vjp(*inputs(), **more, key_mask=MASK, backend=BACKEND)
    cotangent = np.ones((B, S, 2, D))
    expected = pullback(np.where(MASK[:, :, None, None], cotangent, 0.0))
    found = pullback(np.where(MASK[:, :, None, None], cotangent, value))
    for name, gradient in expected.items():
        np.testing.assert_array_equal(found[name], gradient)


def test_an_infinite_cotangent_of_a_row_with_one_key_is_not_hidden():
    # λ is 0, as the only score is 0.
    q, k, v = inputs(t=1, s=1)
    _, pullback = pa.Softmax().vjp(0 * q, k, v, backend=BACKEND)
    with np.errstate(invalid="ignore"):
        gradients = pullback(np.full((B, 1, 2, D), np.inf))
    assert np.isinf(gradients["v"]).all()


def test_a_bias_of_padded_queries_may_be_nan():
    x, lengths = inputs(), np.asarray([S, 2])
    bias = np.random.default_rng(1).normal(size=(B, 2, S, S))
    is_padding = np.arange(S)[None] >= lengths[:, None]
    padded = np.where(is_padding[:, None, :, None], np.nan, bias)
    mechanism, results = pa.Softmax(bias=True), []
    for each in (bias, padded):
        out, pullback = mechanism.vjp(*x, bias=each, lengths=lengths, backend=BACKEND)
        cache = mechanism.init_cache(*x, bias=each, capacity=S)
        step, _ = mechanism.extend(cache, *x, bias=each, lengths=lengths, backend=BACKEND)
        results.append({"out": out, "step": step, **pullback(np.ones_like(out))})
    for name, expected in results[0].items():
        np.testing.assert_array_equal(results[1][name], expected)


def test_queries_beyond_the_window_of_the_first_key_give_zero():
    # Positions of queries end with that of the last key.
    mechanism = pa.Softmax(causal=False, window=2)
    x = inputs(t=200, s=3)
    for backend in ("reference", BACKEND):
        out, pullback = mechanism.vjp(*x, backend=backend)
        result = {"out": out, **pullback(np.ones_like(out))}
        if backend == "reference":
            expected = result
    assert not result["out"][:, :196].any()
    for name, array in expected.items():
        np.testing.assert_allclose(result[name], array, rtol=1e-12, atol=1e-12)
