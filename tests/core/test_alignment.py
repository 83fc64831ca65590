"""The share of a key's centred energy in the top eigenspace (CCQ, arXiv 2606.01294, App. H).

Eq. 28 and 29 are computed here by NumPy's own `eigh`. Everything is float64, and an identity
has to hold to 1e-10; a share is a number in [0, 1].
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.identities import assert_close


def centred(k):
    lengths = np.linalg.norm(k, axis=-1, keepdims=True)
    unit = k / np.where(lengths > 0, lengths, 1)
    return unit - unit.mean(axis=1, keepdims=True)


def shares(k, rank):
    """Eq. 28, head by head."""
    c = centred(k)
    out = np.zeros(k.shape[:3])
    for b, n in np.ndindex(k.shape[0], k.shape[2]):
        keys = c[b, :, n]
        _, vectors = np.linalg.eigh(keys.T @ keys / (len(keys) - 1))
        top = keys @ vectors[:, -rank:]
        out[b, :, n] = np.sum(top**2, axis=-1) / np.sum(keys**2, axis=-1)
    return out


def gaps(k, needle, context, rank):
    """Eq. 29, with a mean for every sequence and head."""
    share = shares(k, rank)
    rows = zip(share, needle, context, strict=True)
    return np.stack([of_row[m].mean(0) - of_row[c].mean(0) for of_row, m, c in rows])


@st.composite
def keys(draw, shortest=2):
    """Keys with unequal variances, so that eigenvectors are well determined; and a rank."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    d = draw(st.integers(2, 6))
    shape = (draw(st.integers(1, 2)), draw(st.integers(shortest, 12)), draw(st.integers(1, 2)), d)
    k = rng.normal(size=shape) * 0.6 ** np.arange(d) + draw(st.sampled_from([0.0, 0.5]))
    return rng, k, draw(st.integers(1, d))


@given(keys(), st.data())
def test_a_share_is_that_of_the_definition_alone_rotated_rescaled_and_in_any_order(given, data):
    rng, k, rank = given
    out, order = pa.alignment(k, rank), data.draw(st.permutations(range(k.shape[1])))
    assert_close(out, shares(k, rank), size=10)
    assert np.all((out >= 0) & (out <= 1 + 1e-12))
    rotation = np.linalg.qr(rng.normal(size=k.shape[-1:] * 2))[0]
    factors = rng.uniform(0.1, 10, size=(*k.shape[:3], 1))
    assert_close(pa.alignment((factors * k @ rotation)[:, order], rank), out[:, order], size=10)
    assert_close(pa.alignment(k[:1, :, :1], rank), out[:1, :, :1], size=10)
    assert_close(pa.alignment(k, k.shape[-1]), np.ones(k.shape[:3]))


def test_a_single_key_has_share_nan_and_a_zero_key_is_centred_like_any_other():
    k = np.random.default_rng(0).normal(size=(2, 6, 3, 4))
    assert np.all(np.isnan(pa.alignment(k[:, :1], 2)))
    k[:, 2] = 0
    assert_close(pa.alignment(k, 1), shares(k, 1))


def with_needle(rng, d=6, s=20):
    """Keys near a plane; keys 4 and 5, the needle, are nearly orthogonal to it."""
    k = 0.02 * rng.normal(size=(2, s, 2, d))
    k[..., :2] += rng.normal(size=(2, s, 2, 2))
    k[:, 4:6] = 0.02 * rng.normal(size=(2, 2, 2, d))
    k[:, 4:6, :, 3] += 1
    needle = np.zeros((2, s), dtype=bool)
    needle[:, 4:6] = True
    return k, needle


@given(keys(shortest=4), st.data())
def test_gaps_are_those_of_the_definition(given, data):
    rng, k, rank = given
    b, s = k.shape[:2]
    needle, context = np.zeros((2, b, s), dtype=bool)
    for row in range(b):
        cut = data.draw(st.integers(1, s - 2))
        order = rng.permutation(s)
        needle[row, order[:cut]] = True
        context[row, order[cut:-1]] = True
    for others, of in ((None, ~needle), (context, context)):
        gap = pa.alignment_gap(k, needle, others, rank=rank)
        assert_close(gap, gaps(k, needle, of, rank), size=10)


@pytest.mark.parametrize("empty", ["needle", "context"])
def test_a_sequence_without_needle_or_context_is_nan_without_a_warning(empty):
    k, needle = with_needle(np.random.default_rng(0))
    masks = {"needle": needle, "context": ~needle}
    masks[empty][1] = False
    out = pa.alignment_gap(k, **masks, rank=2)
    assert np.all(np.isnan(out[1]))
    assert_close(out[:1], gaps(k[:1], masks["needle"][:1], masks["context"][:1], 2))


condition_number, log_mu = pa.diagnostics.condition_number, pa.diagnostics.log_mu


@st.composite
def matrices(draw):
    """Matrices (2, 3, n, d) of full rank, tall or wide, of rows that differ in length."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, d = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    return 10.0 ** rng.uniform(-1, 1, size=(2, 3, n, 1)) * rng.normal(size=(2, 3, n, d))


def gram(a):
    return a @ a.swapaxes(-1, -2) if a.shape[-2] < a.shape[-1] else a.swapaxes(-1, -2) @ a


@given(matrices(), st.floats(-100, 100))
def test_kappa_and_mu_are_those_of_the_gram_matrix_and_no_factor_matters(a, exponent):
    eigenvalues, size = np.linalg.eigvalsh(gram(a)), min(a.shape[-2:])
    kappa = condition_number(a)
    assert kappa.shape == a.shape[:2]
    expected = np.sqrt(eigenvalues[..., -1] / eigenvalues[..., 0])
    assert np.all(np.abs(kappa / expected - 1) <= 1e-13 * kappa**2)  # The Gram matrix squares κ.
    _, log_determinant = np.linalg.slogdet(gram(a))
    norm = np.sqrt(np.sum(a**2, axis=(-1, -2)) / size)
    expected = math.log(2) - log_determinant / 2 + size * np.log(norm)
    assert np.all(np.abs(log_mu(a) - expected) <= 1e-13 * size * kappa**2)
    assert np.all(np.log(kappa) < log_mu(a))
    scaled = 10.0**exponent * a
    assert_close(condition_number(scaled) / kappa, np.ones((2, 3)))
    assert_close(log_mu(scaled), log_mu(a))


@pytest.mark.parametrize("a", [np.zeros((3, 2)), np.diag([2.0, 1.0, 0.0])], ids=["zero", "rank 2"])
def test_a_singular_value_of_0_gives_infinity_without_a_warning(a):
    assert [condition_number(a), log_mu(a)] == [math.inf] * 2
