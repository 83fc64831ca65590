"""Scalings of rows with a guarantee, on what breaks Theorem 4.4 of Preconditioned Attention.

With κ = σ₁ / σ_k and log μ = log 2 + Σ log(‖A‖_F / √k / σ_i), k = min(n, d), for a matrix A of full
rank without rows of zeros, C the row norm, L `leverage_scaling`, and any diagonal G:

    (1)  κ(CA) ≤ ‖CA‖₂ κ(GA) ≤ √n κ(GA)
    (2)  log μ(B) ≤ log μ(GB) + k/2 log η(B),    η(B) = max_i ℓ_i ‖B‖_F² / (k ‖B_i‖²),    B = DA
    (3)  log μ(LA) ≤ log μ(A) − k/2 KL(ℓ/k ‖ ‖A_i‖² / ‖A‖_F²),    equal if n ≤ d

(1) and (2) are tried with the best G that an optimizer finds. Rounding changes log μ by κ ε k.
"""

import numpy as np
import pytest

import precondattn as pa
from precondattn.diagnostics import condition_number as kappa
from precondattn.diagnostics import leverage_scaling, log_mu


def sigma(a):
    return np.linalg.svd(a, compute_uv=False)


def shares(a):
    """ℓ_i / k by another formula than the library's, and ‖A_i‖² / ‖A‖_F²."""
    leverage = np.diag(a @ np.linalg.pinv(a, rcond=1e-13))
    return leverage / min(a.shape), np.sum(a**2, axis=1) / np.sum(a**2)


def row_norm(a):
    return a / np.linalg.norm(a, axis=1, keepdims=True)


def leveraged(a, steps=1):
    return leverage_scaling(a, steps)[:, None] * a


def rounding(*matrices):
    return 1e-13 * max(min(a.shape) * kappa(a) for a in matrices)


def softmax_output(q, k, v, **options):
    return pa.softmax(q, k, v, **options)[0, :, 0]


def counter_example():
    """κ = 1, and one row of twelve is long."""
    one = np.repeat([[1.0, 0.0], [0.0, 1.0]], [1, 11], axis=0).reshape(1, 12, 1, 2)
    return softmax_output(6 * one, 6 * one, one * [np.sqrt(11), 1], causal=False, scale=1.0)


def drawn(seed, n, d, *, mean=0.0, sharp=1.0, causal=False):
    q, k, v = np.random.default_rng(seed).normal(size=(3, 1, n, 1, d))
    return softmax_output(sharp * q, k, v + mean, causal=causal)


def rows(seed, n, d):
    """Rows of very different lengths."""
    rng = np.random.default_rng(seed)
    return 10 ** rng.uniform(-2, 2, size=(n, 1)) * rng.normal(size=(n, d))


def clustered(seed, n, d):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(3, d))[np.arange(n) % 3] + 1e-3 * rows(seed, n, d)


def near_singular(seed, n, d):
    a = rows(seed, n, d)
    a[:, 0] = a[:, 1] + 1e-5 * a[:, 0]
    return a


BREAK_IT = {
    "the counter-example": counter_example(),
    "12 × 2": drawn(6, 12, 2),
    "256 × 8": drawn(0, 256, 8),
    "values with a mean": drawn(0, 64, 8, mean=1.0),
}
OTHERS = {
    "6 × 8, κ rises": drawn(4, 6, 8),
    "sharp": drawn(1, 40, 4, sharp=4.0),
    "causal": drawn(2, 40, 4, causal=True),
    "one column": rows(3, 9, 1),
    "one row": rows(4, 1, 5),
    "square": rows(5, 6, 6),
    "clustered": clustered(8, 20, 5),
    "clustered, wide": clustered(9, 5, 20),
    "near-singular": near_singular(10, 20, 5),
    "near-singular, wide": near_singular(11, 5, 6),
}
MATRICES = BREAK_IT | OTHERS
each = pytest.mark.parametrize("a", MATRICES.values(), ids=MATRICES)


def best_for_kappa(a, steps=600):
    """κ of the best scaling found: descent in log G² of a smooth bound of log κ²."""
    b, x, best = row_norm(a), np.zeros(len(a)), np.inf
    for i in range(steps):
        u, s, _ = np.linalg.svd(np.exp((x - x.max()) / 2)[:, None] * b, full_matrices=False)
        best, power = min(best, s[0] / s[-1]), 4 + 80 * i / steps
        first, last = (s / s[0]) ** power, (s[-1] / s) ** power
        slope = u**2 @ (first / first.sum() - last / last.sum())
        x = x - 0.5 * (1 - i / steps) * slope / max(np.abs(slope).max(), 1e-12)
    return best


@pytest.mark.parametrize("a", BREAK_IT.values(), ids=BREAK_IT)
def test_where_the_row_norm_raises_mu_the_leverage_scaling_does_not(a):
    assert log_mu(row_norm(a)) > log_mu(a) + 1e-4
    assert log_mu(leveraged(a)) <= log_mu(a) + rounding(a)


@each
def test_mu_falls_by_at_least_the_divergence_and_exactly_where_there_are_no_more_rows(a):
    new, old = shares(a)
    least = min(a.shape) / 2 * np.sum(new * np.log(new / old))
    fall = log_mu(a) - log_mu(leveraged(a))
    assert least >= -1e-12
    assert fall >= least - rounding(a)
    if len(a) <= a.shape[1]:
        np.testing.assert_allclose(fall, least, atol=rounding(a))
        np.testing.assert_allclose(leveraged(a), row_norm(a), atol=rounding(a))


@each
def test_no_scaling_found_has_a_smaller_kappa_than_the_row_norm_by_more_than_proved(a):
    factor = sigma(row_norm(a))[0]
    best = min(best_for_kappa(a), kappa(a), kappa(leveraged(a)), kappa(leveraged(a, 50)))
    assert kappa(row_norm(a)) <= factor * best * (1 + rounding(a))
    assert factor <= np.sqrt(len(a)) * (1 + 1e-12)
    assert best <= kappa(row_norm(a))  # The optimizer begins there.


@each
@pytest.mark.parametrize("scaling", ["none", "row norm", "leverage", "leverage, repeated"])
def test_no_scaling_found_has_a_smaller_mu_by_more_than_its_certificate(a, scaling):
    b = {
        "none": lambda a: a,
        "row norm": row_norm,
        "leverage": leveraged,
        "leverage, repeated": lambda a: leveraged(a, 50),
    }[scaling](a)
    k = min(a.shape)
    new, old = shares(b)
    eta = np.max(new / old)
    assert eta >= 1 - 1e-9
    if scaling == "row norm":
        assert eta <= max(1, len(a) / a.shape[1]) * (1 + 1e-6)
    others = [a, row_norm(a), leveraged(a, 300)]
    rng = np.random.default_rng(0)
    others += [10 ** rng.uniform(-0.5, 0.5, size=(len(a), 1)) * x for x in others]
    for other in others:
        assert log_mu(b) <= log_mu(other) + k / 2 * np.log(eta) + rounding(b, other)


@each
def test_repeated_it_comes_within_the_rank_of_the_best_kappa(a):
    b, k = leveraged(a, 300), min(a.shape)
    new, old = shares(b)
    eta = np.max((new / old)[old > 1e-12])
    assert kappa(b) <= k * np.sqrt(eta) * best_for_kappa(a) * (1 + rounding(a))


def test_the_factor_of_the_row_norm_can_not_be_better_than_the_root_of_n_minus_1():
    for n in (3, 12, 100):
        a = np.repeat([[np.sqrt(n - 1), 0.0], [0.0, 1.0]], [1, n - 1], axis=0)
        np.testing.assert_allclose([kappa(a), kappa(row_norm(a))], [1, np.sqrt(n - 1)])
        np.testing.assert_allclose(kappa(leveraged(a)), 1)


def test_rows_get_the_root_of_their_leverage_as_length_in_every_matrix_of_a_batch():
    a = np.stack([rows(1, 8, 3), rows(2, 8, 3)])[:, None]
    length = np.linalg.norm(leverage_scaling(a)[..., None] * a, axis=-1)
    for i in range(2):
        np.testing.assert_allclose(length[i, 0] ** 2, 3 * shares(a[i, 0])[0], rtol=1e-9)


def test_rows_of_zeros_have_factor_1_and_a_missing_rank_is_not_counted():
    a = rows(0, 8, 3)
    a[2] = 0
    a[:, 2] = a[:, 0] + a[:, 1]
    factors = leverage_scaling(a)
    assert factors[2] == 1
    np.testing.assert_allclose(np.sum((factors[:, None] * a) ** 2), 2)
