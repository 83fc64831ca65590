"""LUCID against identities that hold for any implementation.

With Φ_tj = exp(s kn_t·kn_j − s d) and kn the keys divided by their root mean square, the definition
is y_t = β_t (v_t − Σ_{j<t} Φ_tj y_j), read by softmax attention in place of v. P maps v to y.
Everything is float64, and an identity has to hold to 1e-10 of the largest number involved.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.identities import assert_close, causal_mask, identity_values

sampled = settings(
    max_examples=25, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
NORMALIZE = ["keys", "queries_and_keys", "rows", "none"]
KEYS = ["random", "clustered", "duplicate", "zero", "tiny", "opposite"]


def make_keys(rng, kind, shape):
    """Keys (b, s, n, d), of kinds that are hard to distinguish or to normalise."""
    k = rng.normal(size=shape)
    centre = rng.normal(size=(shape[0], 1, *shape[2:]))
    chosen = rng.integers(2, size=shape[1])
    match kind:
        case "clustered":
            return centre + 1e-3 * k
        case "duplicate":
            return k[:, chosen % shape[1]]
        case "zero":
            return k * chosen[:, None, None]
        case "tiny":
            return 1e-4 * k
        case "growing" | "shrinking":  # Scores s‖k‖² from 0.1 to 250.
            squares = np.sort(np.exp(rng.uniform(-2, 5.5, size=(*shape[:3], 1))), axis=1)
            squares = squares if kind == "growing" else squares[:, ::-1]
            return k * np.sqrt(squares * shape[-1] ** 0.5 / np.sum(k * k, axis=-1, keepdims=True))
        case "opposite":
            return centre * (2 * chosen - 1)[:, None, None]
    return k


class LucidProblem:
    """Random q, v and β, and keys of a chosen kind."""

    def __init__(self, rng, kind, *, s, t=None, n=1, group=1, d=3, b=2):
        self.rng, self.group = rng, group
        self.q = rng.normal(size=(b, s if t is None else t, n * group, d))
        self.k = make_keys(rng, kind, (b, s, n, d))
        self.v = rng.normal(size=(b, s, n, 2))
        self.beta = rng.uniform(0.01, 1.99, size=(b, s, n))

    def like_output(self):
        return self.rng.normal(size=(*self.q.shape[:3], self.v.shape[-1]))


@st.composite
def problems(draw, square=True, kinds=KEYS, longest=9, grouped=True):
    s = draw(st.integers(1, longest))
    return LucidProblem(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        draw(st.sampled_from(kinds)),
        s=s,
        t=None if square else draw(st.integers(1, s)),
        n=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)) if grouped else 1,
        d=draw(st.integers(1, 5)),
    )


def rms_norm(x, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def kernel(k, normalize, scale=None, eps=1e-6, window=None):
    """The matrix E of E y = v for the keys (s, d) of one head, entry by entry; β = 1."""
    s, d = k.shape
    scale = d**-0.5 if scale is None else scale
    k = rms_norm(k, eps) if normalize in ("keys", "queries_and_keys") else k
    mask, matrix = causal_mask(s, s, window), np.zeros((s, s))
    for i in range(s):
        row = {j: scale * (k[i] @ k[j]) for j in np.flatnonzero(mask[i])}
        shift = {"none": 0.0, "rows": max(row.values())}.get(normalize, scale * d)
        for j, score in row.items():
            matrix[i, j] = np.exp(score - shift)
        if normalize in ("keys", "queries_and_keys"):
            matrix[i, i] = 1.0
    return matrix


def forward_substitution(matrix, v, beta=None):
    """y with matrix y = v, or y_t = β_t (v_t − Σ_{j<t} matrix_tj y_j) for a unit diagonal."""
    y = np.zeros_like(v)
    for t in range(len(v)):
        rest = v[t] - sum((matrix[t, j] * y[j] for j in range(t)), np.zeros_like(v[t]))
        y[t] = rest / matrix[t, t] if beta is None else beta[t] * rest
    return y


def solve_by_loops(k, v, normalize, beta=None, **options):
    """y for arrays (b, s, n, ·), head by head."""
    y = np.zeros_like(v)
    for b, n in np.ndindex(k.shape[0], k.shape[2]):
        matrix = kernel(k[b, :, n], normalize, **options)
        y[b, :, n] = forward_substitution(
            matrix, v[b, :, n], None if beta is None else beta[b, :, n]
        )
    return y


def softmax_weights(q, k, scale=None, window=None):
    """A of shape (b, h, t, s), row by row over the visible keys."""
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mask = causal_mask(q.shape[1], k.shape[1], window)
    weights = np.zeros((q.shape[0], q.shape[2], *mask.shape))
    for b, h, i in np.ndindex(weights.shape[:3]):
        row = scale * (k[b, mask[i], h] @ q[b, i, h])
        weights[b, h, i, mask[i]] = np.exp(row - np.logaddexp.reduce(row))
    return weights


def read(weights, y):
    """A y, with shared value heads."""
    y = np.repeat(y, weights.shape[1] // y.shape[2], axis=2)
    return np.einsum("bhts,bshe->bthe", weights, y)


def lucid_by_loops(q, k, v, normalize, beta=None, *, scale=None, base_scale=None, eps=1e-6, **rest):
    y = solve_by_loops(k, v, normalize, beta, scale=scale or base_scale, eps=eps, **rest)
    if normalize == "queries_and_keys":
        q, k = rms_norm(q, eps), rms_norm(k, eps)
    return read(softmax_weights(q, k, base_scale, **rest), y)


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


@pytest.mark.parametrize("normalize", NORMALIZE)
@sampled
@given(p=problems(square=False), scales=st.tuples(*[st.none() | st.floats(0.1, 2)] * 2))
def test_output_is_the_definition_written_as_loops(normalize, p, scales):
    scale, base_scale = scales
    layer = pa.Lucid(pa.Softmax(scale=base_scale), normalize=normalize, scale=scale)
    expected = lucid_by_loops(p.q, p.k, p.v, normalize, scale=scale, base_scale=base_scale)
    assert_close(layer(p.q, p.k, p.v), expected)


@pytest.mark.parametrize("normalize", ["keys", "queries_and_keys"])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
@sampled
@given(p=problems(kinds=["random", "clustered", "duplicate", "opposite"]))
def test_output_with_beta_and_eps_is_the_definition_written_as_loops(normalize, eps, p):
    layer = pa.Lucid(normalize=normalize, eps=eps, beta=True)
    expected = lucid_by_loops(p.q, p.k, p.v, normalize, p.beta, eps=eps)
    assert_close(layer(p.q, p.k, p.v, lucid_beta=p.beta), expected, size=np.abs(p.v).max())


@pytest.mark.parametrize("normalize", ["keys", "rows", "none"])
@sampled
@given(p=problems(longest=20, kinds=["random", "zero", "growing", "shrinking"]))
def test_solved_values_satisfy_their_equations(normalize, p):
    y = pa.LucidSolve(normalize=normalize)(p.k, p.v)
    for b, n in np.ndindex(p.k.shape[0], p.k.shape[2]):
        matrix = kernel(p.k[b, :, n], normalize)
        terms = np.abs(matrix) @ np.abs(y[b, :, n])
        assert_close((matrix @ y[b, :, n] - p.v[b, :, n]) / terms, 0.0, size=1)


@sampled
@given(problems(kinds=["random", "duplicate", "opposite"]))
def test_unit_beta_without_eps_is_the_literal_inverse_of_equation_2(p):
    d = p.k.shape[-1]
    kn = p.k / np.sqrt(np.mean(p.k**2, axis=-1, keepdims=True))
    scores = np.einsum("bind,bjnd->bnij", kn, kn) / np.sqrt(d)
    inverse = np.linalg.inv(np.tril(np.exp(scores - np.sqrt(d))))
    y = np.einsum("bnij,bjne->bine", inverse, p.v)
    assert_close(pa.LucidSolve(eps=0)(p.k, p.v), y)
    expected = read(softmax_weights(p.q, p.k), y)
    assert_close(pa.Lucid(eps=0)(p.q, p.k, p.v), expected, size=np.abs(y).max())
    ones = np.ones_like(p.beta)
    with_beta = pa.Lucid(eps=0, beta=True)(p.q, p.k, p.v, lucid_beta=ones)
    assert_close(with_beta, expected, size=np.abs(y).max())


@pytest.mark.parametrize("normalize", ["keys", "rows", "none"])
@sampled
@given(p=problems(square=False))
def test_output_is_softmax_attention_over_the_solved_values(normalize, p):
    y = pa.LucidSolve(normalize=normalize)(p.k, p.v)
    out = pa.Lucid(normalize=normalize)(p.q, p.k, p.v)
    assert_close(out, pa.Softmax()(p.q, p.k, y), size=np.abs(y).max())


@sampled
@given(problems(square=False))
def test_over_laser_the_solved_values_are_read_by_laser(p):
    y = solve_by_loops(p.k, p.v, "keys")
    out = pa.Lucid(pa.Laser())(p.q, p.k, p.v)
    assert_close(out, pa.Laser()(p.q, p.k, y))
    assert_close(out, np.log(read(softmax_weights(p.q, p.k), np.exp(y))), size=1 + np.abs(y).max())


@pytest.mark.parametrize("normalize", ["keys", "rows"])
def test_for_one_token_y_is_its_value(normalize):
    p = LucidProblem(np.random.default_rng(0), "random", s=1, n=2, group=2)
    out = pa.Lucid(normalize=normalize)(p.q, p.k, p.v)
    assert_close(out, np.repeat(p.v, 2, axis=2))


def test_second_token_loses_what_its_key_shares_with_the_first():
    k = np.array([[1.0, 0.0], [1.0, 1.0]]).reshape(1, 2, 1, 2)
    v = np.array([[2.0], [3.0]]).reshape(1, 2, 1, 1)
    shared = np.exp(np.sqrt(2) * (np.cos(np.pi / 4) - 1))  # exp(√d (cos θ − 1))
    y = pa.LucidSolve(eps=0)(k, v)
    assert_close(y[0, :, 0, 0], [2.0, 3.0 - 2.0 * shared])


# Retrieval


@sampled
@given(problems(kinds=["random", "clustered", "duplicate", "opposite"], grouped=False))
def test_a_normalised_query_equal_to_its_key_retrieves_its_value_scaled(p):
    totals = np.tril(phi_of(p.k, eps=0)).sum(-1).transpose(0, 2, 1)[..., None]
    expected = p.v / totals
    layer = pa.Lucid(normalize="queries_and_keys", eps=0)
    assert_close(layer(p.k, p.k, p.v), expected, size=np.abs(p.v).max())
    kn = rms_norm(p.k, 0)
    assert_close(pa.Lucid(eps=0)(kn, kn, p.v), expected, size=np.abs(p.v).max())


@sampled
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
@sampled
@given(p=problems(longest=24))
def test_the_inverse_is_bounded_whatever_the_keys(normalize, eps, p):
    k = rms_norm(p.k, eps) if normalize == "given" else p.k
    inverse = matrix_of(pa.LucidSolve(normalize=normalize, eps=eps), k)
    n = inverse.shape[-1]
    assert np.abs(inverse).max() <= 1 + 1e-12
    assert np.sum(inverse**2, axis=-2).max() <= 2 + 1e-12
    assert np.linalg.cond(inverse).max() <= n * np.sqrt(n + 1) * (1 + 1e-10)


@pytest.mark.parametrize("kind", KEYS)
def test_the_inverse_of_many_tokens_is_bounded_and_exact(kind):
    k = make_keys(np.random.default_rng(0), kind, (1, 300, 1, 8))
    inverse, lower = matrix_of(pa.LucidSolve(), k)[0, 0], kernel(k[0, :, 0], "keys")
    assert np.abs(inverse).max() <= 1 + 1e-10
    assert np.sum(inverse**2, axis=0).max() <= 2 + 1e-10
    assert np.linalg.cond(lower) <= 300 * np.sqrt(301)
    assert_close(lower @ inverse, np.eye(300))
    assert_close(inverse @ lower, np.eye(300))


@sampled
@given(problems(longest=24))
def test_the_energy_of_the_inverse_is_the_energy_that_the_state_has_lost(p):
    inverse, phi = matrix_of(pa.LucidSolve(), p.k), phi_of(p.k)
    transposed = np.swapaxes(inverse, -1, -2)
    assert_close(transposed @ inverse + transposed @ phi @ inverse, inverse + transposed)


@sampled
@given(problems(longest=24))
def test_beta_below_two_bounds_the_inverse_and_its_energy(p):
    beta = p.beta.transpose(0, 2, 1)[..., None]
    solved = matrix_of(pa.LucidSolve(beta=True), p.k, lucid_beta=p.beta)
    inverse = solved / np.swapaxes(beta, -1, -2)  # of I + diag(β) stril(Φ)
    assert_close(np.einsum("bnii->bni", inverse), 1.0)
    below = np.tril(inverse, -1)
    assert np.all(np.abs(below) <= beta + 1e-12)
    assert np.sum(below**2 * (2 - beta) / beta, axis=-2).max() <= 1 + 1e-12
    phi, transposed = phi_of(p.k), np.swapaxes(solved, -1, -2)
    balance = transposed @ ((2 / beta - 1) * solved) + transposed @ phi @ solved
    assert_close(balance, solved + transposed, size=np.abs(solved).max() / p.beta.min())


def test_beta_of_two_reflects_and_stays_bounded():
    k = make_keys(np.random.default_rng(0), "clustered", (1, 200, 1, 4))
    solved = matrix_of(pa.LucidSolve(beta=True), k, lucid_beta=np.full((1, 200, 1), 2.0))
    assert np.abs(solved).max() <= 4 + 1e-9


@pytest.mark.parametrize("d", [4, 64, 256])
@pytest.mark.parametrize("eps", [1e-6, 1e-3])
def test_zero_keys_keep_the_size_of_values(d, eps):
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(1, 8, 1, d)), rng.normal(size=(1, 8, 1, 3))
    k[:, [0, 3, 4]] = 0
    y = pa.LucidSolve(eps=eps)(k, v)
    assert_close(y, solve_by_loops(k, v, "keys", eps=eps))
    assert np.linalg.norm(y) <= 4 * np.linalg.norm(v)  # √(2N), N = 8
    _, pullback = pa.LucidSolve(eps=eps).vjp(k, v)
    assert all(np.all(np.isfinite(gradient)) for gradient in pullback(v).values())


# Special values


@pytest.mark.parametrize("normalize", ["keys", "queries_and_keys"])
@sampled
@given(p=problems(kinds=["random"]))
def test_duplicate_keys_turn_values_into_differences(normalize, p):
    k = np.broadcast_to(p.k[:, :1], p.k.shape)
    differences = np.diff(p.v, axis=1, prepend=0)
    assert_close(pa.LucidSolve(eps=0)(k, p.v), differences)
    out = pa.Lucid(normalize=normalize, eps=0)(p.q, k, p.v)
    counts = np.arange(1, k.shape[1] + 1)[:, None, None]
    assert_close(out, np.repeat(p.v, p.group, axis=2) / counts, size=np.abs(p.v).max())


@sampled
@given(problems())
def test_beta_of_zero_stores_nothing(p):
    zeros = np.zeros_like(p.beta)
    assert np.all(pa.LucidSolve(beta=True)(p.k, p.v, lucid_beta=zeros) == 0)
    assert np.all(pa.Lucid(beta=True)(p.q, p.k, p.v, lucid_beta=zeros) == 0)


@sampled
@given(problems(longest=12))
def test_a_token_with_beta_of_zero_is_as_if_absent_from_the_solve(p):
    kept = p.rng.random(p.k.shape[1]) < 0.6
    assume(kept.any())
    y = pa.LucidSolve(beta=True)(p.k, p.v, lucid_beta=np.where(kept[:, None], p.beta, 0.0))
    alone = pa.LucidSolve(beta=True)(p.k[:, kept], p.v[:, kept], lucid_beta=p.beta[:, kept])
    assert np.all(y[:, ~kept] == 0)
    assert_close(y[:, kept], alone)


@sampled
@given(problems(kinds=["random"]), st.permutations(range(8)))
def test_a_large_scale_does_not_change_values_of_distinct_directions(p, order):
    corners = np.array(list(np.ndindex(2, 2, 2)), dtype=float)[order] * 2 - 1
    s = min(8, p.k.shape[1])
    q, v = p.rng.normal(size=(2, s, 2 * p.group, 3)), p.rng.normal(size=(2, s, 2, 2))
    k = corners[:s, None] * p.rng.uniform(0.5, 2, size=(2, s, 2, 1))
    np.testing.assert_array_equal(pa.LucidSolve(scale=1e3)(k, v), v)
    assert_close(pa.Lucid(scale=1e3)(q, k, v), pa.Softmax()(q, k, v))


def test_a_constant_value_is_not_preserved():
    p = LucidProblem(np.random.default_rng(0), "clustered", s=6)
    assert not np.allclose(pa.Lucid()(p.q, p.k, np.ones_like(p.v)), 1.0, atol=0.1)


# Invariance


@sampled
@given(problems(kinds=["random", "clustered", "duplicate", "opposite"]))
def test_the_length_of_a_key_does_not_matter(p):
    k = p.k * np.exp(p.rng.uniform(-7, 7, size=(*p.k.shape[:3], 1)))
    q = p.q * np.exp(p.rng.uniform(-7, 7, size=(*p.q.shape[:3], 1)))
    solve = pa.LucidSolve(eps=0)
    assert_close(solve(k, p.v), solve(p.k, p.v))
    layer = pa.Lucid(normalize="queries_and_keys", eps=0)
    assert_close(layer(q, k, p.v), layer(p.q, p.k, p.v), size=np.abs(p.v).max())
    y, pullback = solve.vjp(p.k, p.v)
    size = np.abs(y).max() * np.abs(p.v).sum()
    assert_close(np.sum(p.k * pullback(p.v)["k"], axis=-1), 0.0, size=size)


@pytest.mark.parametrize("normalize", NORMALIZE)
@sampled
@given(p=problems())
def test_a_common_rotation_of_queries_and_keys_does_not_matter(normalize, p):
    d = p.k.shape[-1]
    rotation, _ = np.linalg.qr(p.rng.normal(size=(d, d)))
    layer = pa.Lucid(normalize=normalize)
    out = layer(p.q, p.k, p.v)
    assert_close(layer(p.q @ rotation, p.k @ rotation, p.v), out, size=np.abs(p.v).max())


@pytest.mark.parametrize("normalize", NORMALIZE)
@sampled
@given(p=problems(), a=st.sampled_from([-7, -1, 0, 0.3]), c=st.sampled_from([-1, 0, 1e-3, 9]))
def test_output_is_linear_in_the_values(normalize, p, a, c):
    layer, w = pa.Lucid(normalize=normalize), p.rng.normal(size=p.v.shape)
    parts = a * layer(p.q, p.k, p.v), c * layer(p.q, p.k, w)
    out = layer(p.q, p.k, a * p.v + c * w)
    assert_close(out, sum(parts), size=np.abs(parts).max())


@sampled
@given(problems())
def test_normalising_rows_equals_no_normalisation_with_rescaled_values(p):
    d = p.k.shape[-1]
    scores = np.einsum("bind,bjnd->bnij", p.k, p.k) / np.sqrt(d)
    is_visible = np.tril(np.ones(scores.shape[-2:], dtype=bool))
    highest = np.where(is_visible, scores, -np.inf).max(-1).transpose(0, 2, 1)[..., None]
    y = pa.LucidSolve(normalize="rows")(p.k, p.v)
    assert_close(y, pa.LucidSolve(normalize="none")(p.k, np.exp(highest) * p.v))


@sampled
@given(problems(kinds=["random", "clustered", "duplicate", "opposite"]))
def test_for_unit_keys_all_normalisations_agree(p):
    kn, d = rms_norm(p.k, 0), p.k.shape[-1]
    y = pa.LucidSolve(eps=0)(kn, p.v)
    assert_close(pa.LucidSolve(normalize="given")(kn, p.v), y)
    assert_close(pa.LucidSolve(normalize="rows")(kn, p.v), y)
    assert_close(np.exp(np.sqrt(d)) * pa.LucidSolve(normalize="none")(kn, p.v), y)


# Masks, heads and time


@pytest.mark.parametrize("normalize", NORMALIZE)
@sampled
@given(p=problems(square=False), window=st.integers(1, 9))
def test_a_window_masks_both_factors_alike(normalize, p, window):
    layer = pa.Lucid(pa.Softmax(window=window), normalize=normalize)
    expected = lucid_by_loops(p.q, p.k, p.v, normalize, window=window)
    assert_close(layer(p.q, p.k, p.v), expected)


@sampled
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


@pytest.mark.parametrize("normalize", NORMALIZE)
@sampled
@given(p=problems())
def test_masking_keys_equals_deleting_them_even_when_they_are_nan(normalize, p):
    mask = p.rng.random(p.k.shape[1]) < 0.7
    mask[-1] = True
    k, v = (np.where(mask[:, None, None], x, np.nan) for x in (p.k, p.v))
    out, pullback = pa.Lucid(normalize=normalize).vjp(
        p.q, k, v, key_mask=np.tile(mask, (len(k), 1))
    )
    alone = pa.Lucid(normalize=normalize)(p.q[:, mask], p.k[:, mask], p.v[:, mask])
    assert_close(out[:, mask], alone)
    gradients = pullback(p.like_output())
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())
    assert np.all(gradients["k"][:, ~mask] == 0)
    assert np.all(gradients["v"][:, ~mask] == 0)


# Gradients


@pytest.mark.parametrize("normalize", NORMALIZE)
@sampled
@given(problems())
def test_the_gradient_of_values_is_the_adjoint(normalize, p):
    out, pullback = pa.Lucid(normalize=normalize).vjp(p.q, p.k, p.v)
    cotangent = p.like_output()
    dv = pullback(cotangent)["v"]
    size = np.sum(np.abs(cotangent * out)) + np.sum(np.abs(dv * p.v))
    assert_close(np.sum(cotangent * out), np.sum(dv * p.v), size=size)


def adjoint_of_solve(k, v, y, dy, normalize, beta):
    """dk, dv, dβ of one head at eps = 0, from Eᵀ x = dy, in closed form."""
    s, d = k.shape
    size = np.sqrt(np.mean(k * k, axis=-1, keepdims=True))
    keys = k / size if normalize == "keys" else k
    matrix = kernel(k, normalize, eps=0.0)
    below = np.tril(matrix, -1)
    if normalize == "keys":
        x = np.linalg.inv(np.eye(s) + beta[:, None] * below).T @ dy
        dv = beta[:, None] * x
        dbeta = np.sum(x * (v - below @ y), axis=-1)
        dscores = -np.tril(dv @ y.T, -1) * matrix
    else:
        x = dv = np.linalg.inv(matrix).T @ dy
        dbeta = None
        dscores = -np.tril(x @ y.T) * matrix
    if normalize == "rows":
        for i in range(s):
            dscores[i, np.argmax(k[: i + 1] @ k[i])] += x[i] @ v[i]
    dkeys = (dscores @ keys + dscores.T @ keys) * d**-0.5
    if normalize == "keys":
        dkeys = (dkeys - keys * np.mean(keys * dkeys, axis=-1, keepdims=True)) / size
    return dkeys, dv, dbeta


@pytest.mark.parametrize("normalize", ["keys", "rows", "none"])
@sampled
@given(p=problems(kinds=["random", "clustered"], grouped=False))
def test_gradient_of_the_solve_is_one_transposed_solve(normalize, p):
    named = {"lucid_beta": p.beta} if normalize == "keys" else {}
    solve = pa.LucidSolve(normalize=normalize, eps=0, beta=bool(named))
    y, pullback = solve.vjp(p.k, p.v, **named)
    dy = p.rng.normal(size=y.shape)
    gradients = pullback(dy)
    for b, n in np.ndindex(p.k.shape[0], p.k.shape[2]):
        head = (b, slice(None), n)
        dk, dv, dbeta = adjoint_of_solve(
            p.k[head], p.v[head], y[head], dy[head], normalize, p.beta[head]
        )
        size = max(np.abs(dv).max(), 1) * max(np.abs(y).max(), 1)
        assert_close(gradients["k"][head], dk, size=size)
        assert_close(gradients["v"][head], dv)
        if named:
            assert_close(gradients["lucid_beta"][head], dbeta, size=size)


def test_detaching_the_row_maximum_drops_its_gradient_only():
    p = LucidProblem(np.random.default_rng(0), "random", s=6)
    y, pullback = pa.LucidSolve(normalize="rows").vjp(p.k, p.v)
    detached_y, detached_pullback = pa.LucidSolve(normalize="rows", detach_max=True).vjp(p.k, p.v)
    np.testing.assert_array_equal(y, detached_y)
    gradients, detached = pullback(p.v), detached_pullback(p.v)
    assert_close(gradients["v"], detached["v"])
    for b in range(2):
        k, x = p.k[b, :, 0], detached["v"][b, :, 0]
        through_maximum = np.zeros_like(k)
        for i in range(6):
            j = np.argmax(k[: i + 1] @ k[i])
            dm = x[i] @ p.v[b, i, 0] / np.sqrt(3)
            through_maximum[i] += dm * k[j]
            through_maximum[j] += dm * k[i]
        difference = gradients["k"][b, :, 0] - detached["k"][b, :, 0]
        assert_close(difference, through_maximum, size=np.abs(gradients["k"]).max())
