"""LUCID against identities that hold for any implementation.

With Φ_tj = exp(s kn_t·kn_j − s d) and kn the keys divided by their root mean square, the definition
is y_t = β_t (v_t − Σ_{j<t} Φ_tj y_j), read by softmax attention in place of v. P maps v to y.
Everything is float64, and an identity has to hold to 1e-10 of the largest number involved.
"""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.definitions import assert_is_defined, normed
from tests.mathematics.identities import assert_close, causal_mask, identity_values
from tests.mathematics.problems import DISTINCT, KEYS, Problem, keys_of, problems


def betas(p):
    return p.rng.uniform(0.01, 1.99, size=p.k.shape[:3])


def kernel(k, normalize, scale=None, eps=1e-6, window=None):
    """The matrix E of E y = v for the keys (s, d) of one head, entry by entry; β = 1."""
    s, d = k.shape
    scale = d**-0.5 if scale is None else scale
    k = normed(k, "rms", eps) if normalize in ("keys", "queries_and_keys") else k
    mask, matrix = causal_mask(s, s, window), np.zeros((s, s))
    for i in range(s):
        row = {j: scale * (k[i] @ k[j]) for j in np.flatnonzero(mask[i])}
        shift = {"none": 0.0, "rows": max(row.values())}.get(normalize, scale * d)
        for j, score in row.items():
            matrix[i, j] = np.exp(score - shift)
        if normalize in ("keys", "queries_and_keys"):
            matrix[i, i] = 1.0
    return matrix


def matrix_of(mechanism, *arrays, **named):
    """The (b, heads, t, s) matrix by which values become the output."""
    return mechanism(*arrays, identity_values(arrays[-1]), **named).transpose(0, 2, 1, 3)


def phi_of(k, eps=1e-6):
    """The full symmetric Φ with its unit diagonal, (b, n, s, s)."""
    phi = np.zeros((k.shape[0], k.shape[2], k.shape[1], k.shape[1]))
    for b, n in np.ndindex(phi.shape[:2]):
        lower = kernel(k[b, :, n], "keys", eps=eps)
        phi[b, n] = lower + np.tril(lower, -1).T
    return phi


# The definition


@pytest.mark.parametrize("normalize", ["keys", "rows", "none"])
@given(p=problems(longest=20, kinds=["random", "zero", "growing", "shrinking"]))
def test_solved_values_satisfy_their_equations(normalize, p):
    y = pa.LucidSolve(normalize=normalize)(p.k, p.v)
    for b, n in np.ndindex(p.k.shape[0], p.k.shape[2]):
        matrix = kernel(p.k[b, :, n], normalize)
        terms = np.abs(matrix) @ np.abs(y[b, :, n])
        assert_close((matrix @ y[b, :, n] - p.v[b, :, n]) / terms, 0.0, size=1)


def test_second_token_loses_what_its_key_shares_with_the_first():
    k = np.array([[1.0, 0.0], [1.0, 1.0]]).reshape(1, 2, 1, 2)
    v = np.array([[2.0], [3.0]]).reshape(1, 2, 1, 1)
    shared = np.exp(np.sqrt(2) * (np.cos(np.pi / 4) - 1))  # exp(√d (cos θ − 1))
    y = pa.LucidSolve(eps=0)(k, v)
    assert_close(y[0, :, 0, 0], [2.0, 3.0 - 2.0 * shared])


# Retrieval


@given(problems(kinds=DISTINCT, grouped=False))
def test_a_normalised_query_equal_to_its_key_retrieves_its_value_scaled(p):
    totals = np.tril(phi_of(p.k, eps=0)).sum(-1).transpose(0, 2, 1)[..., None]
    expected = p.v / totals
    layer = pa.Lucid(normalize="queries_and_keys", eps=0)
    assert_close(layer(p.k, p.k, p.v), expected, size=np.abs(p.v).max())
    kn = normed(p.k, "rms", 0)
    assert_close(pa.Lucid(eps=0)(kn, kn, p.v), expected, size=np.abs(p.v).max())


@given(problems(kinds=["random", "clustered", "duplicate"], grouped=False))
def test_without_normalisation_the_factor_is_one_over_the_sum_of_exponentials(p):
    raw = np.einsum("bind,bjnd->bnij", p.k, p.k) / np.sqrt(p.k.shape[-1])
    is_visible = np.tril(np.ones(raw.shape[-2:], dtype=bool))
    totals = np.where(is_visible, np.exp(raw), 0).sum(-1)
    expected = np.eye(p.k.shape[1]) / totals[..., None]
    assert_close(matrix_of(pa.Lucid(normalize="none"), p.k, p.k), expected)
    highest = np.exp(np.where(is_visible, raw, -np.inf).max(-1))[..., None]
    assert_close(matrix_of(pa.Lucid(normalize="rows"), p.k, p.k), expected * highest)


def test_raw_keys_do_not_retrieve_their_value_alone_as_the_paper_claims():
    k = np.random.default_rng(0).normal(size=(4, 12, 1, 4))
    product = matrix_of(pa.Lucid(eps=0), k, k)[:, 0]
    diagonal = np.einsum("bii->bi", product)
    off_diagonal = np.abs(np.tril(product, -1)) / np.abs(diagonal)[:, :, None]
    assert off_diagonal.max() > 0.3


def test_retrieval_of_a_repeated_key_is_attenuated_by_its_count():
    k = np.full((1, 10, 1, 4), 2.0)
    v = np.random.default_rng(0).normal(size=(1, 10, 1, 3))
    out = pa.Lucid(eps=0)(k, k, v)
    assert_close(out, v / np.arange(1, 11)[:, None, None])


# Boundedness


@pytest.mark.parametrize("normalize", ["keys", "given"])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
@given(p=problems(KEYS, longest=24))
def test_the_inverse_is_bounded_whatever_the_keys(normalize, eps, p):
    k = normed(p.k, "rms", eps) if normalize == "given" else p.k
    inverse = matrix_of(pa.LucidSolve(normalize=normalize, eps=eps), k)
    n = inverse.shape[-1]
    assert np.abs(inverse).max() <= 1 + 1e-12
    assert np.sum(inverse**2, axis=-2).max() <= 2 + 1e-12
    assert np.linalg.cond(inverse).max() <= n * np.sqrt(n + 1) * (1 + 1e-10)


@pytest.mark.parametrize("kind", KEYS)
def test_the_inverse_of_many_tokens_is_bounded_and_exact(kind):
    k = keys_of(np.random.default_rng(0), kind, (1, 300, 1, 8))
    inverse, lower = matrix_of(pa.LucidSolve(), k)[0, 0], kernel(k[0, :, 0], "keys")
    assert np.abs(inverse).max() <= 1 + 1e-10
    assert np.sum(inverse**2, axis=0).max() <= 2 + 1e-10
    assert np.linalg.cond(lower) <= 300 * np.sqrt(301)
    assert_close(lower @ inverse, np.eye(300))
    assert_close(inverse @ lower, np.eye(300))


@given(problems(KEYS, longest=24))
def test_the_energy_of_the_inverse_is_the_energy_that_the_state_has_lost(p):
    inverse, phi = matrix_of(pa.LucidSolve(), p.k), phi_of(p.k)
    transposed = np.swapaxes(inverse, -1, -2)
    assert_close(transposed @ inverse + transposed @ phi @ inverse, inverse + transposed)


@given(problems(KEYS, longest=24))
def test_beta_below_two_bounds_the_inverse_and_its_energy(p):
    given = betas(p)
    beta = given.transpose(0, 2, 1)[..., None]
    solved = matrix_of(pa.LucidSolve(beta=True), p.k, lucid_beta=given)
    inverse = solved / np.swapaxes(beta, -1, -2)  # of I + diag(β) stril(Φ)
    assert_close(np.einsum("bnii->bni", inverse), 1.0)
    below = np.tril(inverse, -1)
    assert np.all(np.abs(below) <= beta + 1e-12)
    assert np.sum(below**2 * (2 - beta) / beta, axis=-2).max() <= 1 + 1e-12
    phi, transposed = phi_of(p.k), np.swapaxes(solved, -1, -2)
    balance = transposed @ ((2 / beta - 1) * solved) + transposed @ phi @ solved
    assert_close(balance, solved + transposed, size=np.abs(solved).max() / given.min())


def test_beta_of_two_reflects_and_stays_bounded():
    k = keys_of(np.random.default_rng(0), "clustered", (1, 200, 1, 4))
    solved = matrix_of(pa.LucidSolve(beta=True), k, lucid_beta=np.full((1, 200, 1), 2.0))
    assert np.abs(solved).max() <= 4 + 1e-9


@pytest.mark.parametrize("d", [4, 64, 256])
@pytest.mark.parametrize("eps", [1e-6, 1e-3])
def test_zero_keys_keep_the_size_of_values(d, eps):
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(1, 8, 1, d)), rng.normal(size=(1, 8, 1, 3))
    k[:, [0, 3, 4]] = 0
    y = pa.LucidSolve(eps=eps)(k, v)
    assert np.linalg.norm(y) <= 4 * np.linalg.norm(v)  # √(2N), N = 8
    assert_is_defined(pa.Lucid(eps=eps), {"q": rng.normal(size=k.shape), "k": k, "v": v})


# Special values


@pytest.mark.parametrize("normalize", ["keys", "queries_and_keys"])
@given(p=problems(square=True))
def test_duplicate_keys_turn_values_into_differences(normalize, p):
    k = np.broadcast_to(p.k[:, :1], p.k.shape)
    differences = np.diff(p.v, axis=1, prepend=0)
    assert_close(pa.LucidSolve(eps=0)(k, p.v), differences)
    out = pa.Lucid(normalize=normalize, eps=0)(p.q, k, p.v)
    counts = np.arange(1, k.shape[1] + 1)[:, None, None]
    assert_close(out, np.repeat(p.v, p.group, axis=2) / counts, size=np.abs(p.v).max())


@given(problems(KEYS))
def test_beta_of_zero_stores_nothing(p):
    zeros = np.zeros(p.k.shape[:3])
    assert np.all(pa.LucidSolve(beta=True)(p.k, p.v, lucid_beta=zeros) == 0)
    assert np.all(pa.Lucid(beta=True)(p.q, p.k, p.v, lucid_beta=zeros) == 0)


@given(problems(KEYS, longest=12))
def test_a_token_with_beta_of_zero_is_as_if_absent_from_the_solve(p):
    kept, beta = p.rng.random(p.k.shape[1]) < 0.6, betas(p)
    assume(kept.any())
    y = pa.LucidSolve(beta=True)(p.k, p.v, lucid_beta=np.where(kept[:, None], beta, 0.0))
    alone = pa.LucidSolve(beta=True)(p.k[:, kept], p.v[:, kept], lucid_beta=beta[:, kept])
    assert np.all(y[:, ~kept] == 0)
    assert_close(y[:, kept], alone)


@given(problems(kinds=["random"]), st.permutations(range(8)))
def test_a_large_scale_does_not_change_values_of_distinct_directions(p, order):
    corners = np.array(list(np.ndindex(2, 2, 2)), dtype=float)[order] * 2 - 1
    s = min(8, p.k.shape[1])
    q, v = p.rng.normal(size=(2, s, 2 * p.group, 3)), p.rng.normal(size=(2, s, 2, 2))
    k = corners[:s, None] * p.rng.uniform(0.5, 2, size=(2, s, 2, 1))
    np.testing.assert_array_equal(pa.LucidSolve(scale=1e3)(k, v), v)
    assert_close(pa.Lucid(scale=1e3)(q, k, v), pa.Softmax()(q, k, v))


def test_a_constant_value_is_not_preserved():
    p = Problem(0, "clustered", s=6)
    assert not np.allclose(pa.Lucid()(p.q, p.k, np.ones_like(p.v)), 1.0, atol=0.1)


# Windows and time


@given(problems(kinds=["random", "clustered"], grouped=False), st.integers(1, 9))
def test_retrieval_within_a_window_needs_the_same_window_in_both_factors(p, window):
    layer = pa.Lucid(pa.Softmax(window=window), normalize="queries_and_keys", eps=0)
    is_visible = causal_mask(p.k.shape[1], p.k.shape[1], window)
    totals = np.where(is_visible, phi_of(p.k, eps=0), 0).sum(-1)
    assert_close(matrix_of(layer, p.k, p.k), np.eye(p.k.shape[1]) / totals[..., None], size=1)


@pytest.mark.parametrize(
    ("normalize", "keys"),
    [("none", [0.5, 1, 2, 4, 6, 8, 10]), ("rows", [2, 10, -4, -2, 12, 6, 0, 8])],
)
def test_long_future_keys_cost_past_outputs_no_accuracy(normalize, keys):
    solve = pa.LucidSolve(normalize=normalize)
    k = np.array(keys, dtype=float).reshape(1, -1, 1, 1)
    v = np.ones_like(k)
    y = solve(k, v)
    assert_close(y[0, 0, 0, 0], {"none": np.exp(-0.25), "rows": 1.0}[normalize])
    assert_close(y[:, :4], solve(k[:, :4], v[:, :4]))


@pytest.mark.parametrize("kind", [*KEYS, "growing"])
@pytest.mark.parametrize("normalize", ["keys", "queries_and_keys", "rows", "none"])
def test_output_and_gradient_are_those_of_the_definition_for_keys_of_every_kind(normalize, kind):
    if (normalize, kind) == ("rows", "zero"):
        kind = "random"  # Equal scores of zero keys have no one maximum.
    p = Problem(0, kind, s=9, t=7, n=2, group=2)
    m = pa.Lucid(normalize=normalize)
    times = 1.0
    if normalize in ("rows", "none") and kind == "growing":  # Values grow by the products of rows.
        times = 1 + np.abs(pa.LucidSolve(normalize=normalize)(p.k, p.v)).max()
    assert_is_defined(m, p.x(m), times)
