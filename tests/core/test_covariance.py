"""The spectrum of the running covariance of keys, and the margin that CCQ moves (Eq. 24 to 26).

Both are computed here with NumPy from the keys that each token sees, and the margin also from the
weights of linear attention with and without CCQ.
"""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.identities import assert_close

spectrum, margin_gain = pa.diagnostics.covariance_spectrum, pa.diagnostics.margin_gain
KINDS = ("random", "clustered", "equal", "some zero")


def unit(x):
    lengths = np.linalg.norm(x, axis=-1, keepdims=True)
    return x / np.where(lengths > 0, lengths, 1)


def keys(kind, shape=(2, 7, 2, 5)):
    rng = np.random.default_rng(0)
    k = rng.normal(size=shape)
    if kind == "clustered":
        k = k[:, np.arange(shape[1]) % 2] + 0.01 * rng.normal(size=shape)
    elif kind == "equal":
        k[:] = k[:, :1]
    elif kind == "some zero":
        k[:, [0, 3]] = 0
    return k


def covariance(seen, weights=None):
    """Σ of the keys (j, d), with weights (j)."""
    return np.cov(seen.T, bias=True, aweights=weights).reshape(seen.shape[1], seen.shape[1])


@pytest.mark.parametrize("kind", KINDS)
def test_the_spectrum_is_that_of_the_keys_so_far_of_which_a_gate_counts_earlier_ones_less(kind):
    k, g = keys(kind), -np.random.default_rng(1).exponential(size=(2, 7, 4))
    out = spectrum(k, g)
    assert out.shape == (2, 7, 4, 5)
    for b, t, h in np.ndindex(2, 7, 4):
        after = np.cumsum(g[b, t::-1, h])[::-1] - g[b, : t + 1, h]
        sigma = covariance(unit(k[b, : t + 1, h // 2]), np.exp(after))
        assert_close(out[b, t, h], np.linalg.eigvalsh(sigma)[::-1], size=0.01)
    plain = spectrum(k)
    for b, t, n in np.ndindex(k.shape[:3]):
        sigma = covariance(unit(k[b, : t + 1, n]))
        assert_close(plain[b, t, n], np.linalg.eigvalsh(sigma)[::-1], size=0.01)


def problem(kind, t=4):
    rng = np.random.default_rng(2)
    k = keys(kind)
    q, contraction = rng.normal(size=(2, t, 4, 5)), rng.uniform(size=(2, t, 4))
    return q, k, rng.integers(0, 7 - t + 1, size=(2, t)), contraction


@pytest.mark.parametrize("rank_one", [False, True])
@pytest.mark.parametrize("kind", ["random", "clustered", "some zero"])
def test_the_gain_is_that_of_the_paper(kind, rank_one):
    q, k, target, contraction = problem(kind)
    out = margin_gain(q, k, target, contraction, rank_one=rank_one)
    for b, h, t in np.ndindex(2, 4, 4):
        seen, u_q = unit(k[b, : t + 4, h // 2]), unit(q[b, t, h])
        sigma = covariance(seen)
        if rank_one:
            sizes, vectors = np.linalg.eigh(sigma)
            sigma = sizes[-1] * np.outer(vectors[:, -1], vectors[:, -1])
        expected = contraction[b, t, h] * (seen - seen[target[b, t]]) @ sigma @ u_q
        assert_close(out[b, h, t, : t + 4], expected, size=1)
        assert np.all(np.isnan(out[b, h, t, t + 4 :]))


def test_it_is_the_change_of_the_weights_of_linear_attention():
    q, k, target, contraction = problem("random")
    q, k = unit(q), unit(k)
    linear = pa.Linear(scale=1)
    after = pa.diagnostics.weights(pa.CCQ(linear, eps=0), q, k, k, contraction=contraction)
    changed = after - pa.diagnostics.weights(linear, q, k, k)
    of_target = np.take_along_axis(changed, target[:, None, :, None], axis=3)
    gain = margin_gain(q, k, target, contraction)
    seen = ~np.isnan(gain)
    assert_close(gain[seen], (of_target - changed)[seen])


def test_a_target_after_its_query_has_no_margin():
    q, k, target, contraction = problem("random")
    target[:, 0] = 5  # The query is at 3.
    out = margin_gain(q, k, target, contraction)
    assert np.all(np.isnan(out[:, :, 0]))
    assert np.all(np.isfinite(out[:, :, 3]))
