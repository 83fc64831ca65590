"""Row-normalised attention against identities that hold for any implementation.

The definition is y_i = o_i / max(‖o_i‖, ε), o being the output of the base, row by row and head by
head; the norm is constant to the gradient unless `detach=False`. Outputs and gradients are
compared in `test_definitions.py`. Everything is float64, and an identity has to hold to 1e-10 of
the largest number involved.
"""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.identities import assert_close
from tests.mathematics.problems import Problem


def length(x, axis=-1):
    return np.sqrt(np.sum(x * x, axis=axis, keepdims=True))


def unit(o, eps=1e-6, axis=-1):
    return o / np.maximum(length(o, axis), eps)


def rows_of_values(b, t, low=0.1):
    """Rows of lengths from `low` to 10, in both directions of every axis."""
    rng = np.random.default_rng(b * 100 + t)
    o = unit(rng.normal(size=(b, t, 2, 3)))
    return o * np.exp(rng.uniform(np.log(low), np.log(10), size=(b, t, 2, 1)))


# The piece


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("height", [1e-3, 1.0, 1e3, 1e100])
def test_rows_are_of_length_one_and_keep_their_direction(detach, height):
    o = height * rows_of_values(2, 5)
    y = pa.UnitRows(detach=detach)(o)
    assert_close(length(y), 1.0)
    assert_close(y * length(o), o)


@pytest.mark.parametrize("height", [1e-100, 1e-9, 1.0, 1e100])
def test_without_eps_every_row_is_of_length_one_however_short(height):
    assert_close(length(pa.UnitRows(eps=0)(height * rows_of_values(2, 5))), 1.0)


@pytest.mark.parametrize("eps", [1e-6, 0.5, 20.0])
def test_shorter_rows_are_divided_by_eps(eps):
    o = rows_of_values(2, 6, low=0.05) * min(1, eps)
    expected = np.where(length(o) > eps, o / length(o), o / eps)
    assert_close(pa.UnitRows(eps=eps)(o), expected)
    assert np.any(length(o) < eps)


def test_a_row_as_long_as_eps_is_of_length_one():
    o = np.array([0.3, 0.4]).reshape(1, 1, 1, 2)
    assert_close(pa.UnitRows(eps=0.5)(o), o / 0.5)


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("eps", [0, 1e-6])
def test_zero_rows_stay_zero_with_a_finite_gradient(eps, detach, axis):
    o, dy = rows_of_values(2, 6), np.random.default_rng(0).normal(size=(2, 6, 2, 3))
    o[:, 2] = 0
    o[..., 1] = 0
    y, pullback = pa.UnitRows(eps=eps, detach=detach, axis=axis).vjp(o)
    assert np.all(y[o == 0] == 0)
    assert_close(y, unit(o, 1e-6, axis=-1 if axis == "token" else 1))
    gradient = pullback(dy)["o"]
    assert np.all(np.isfinite(gradient))
    if eps:
        zero = (length(o, -1 if axis == "token" else 1) == 0) & np.ones_like(o, dtype=bool)
        assert_close(gradient[zero], dy[zero] / eps)


@pytest.mark.parametrize(("dtype", "eps"), [("float32", 1e-45), ("float64", 5e-324)])
def test_an_eps_whose_reciprocal_is_infinite_counts_as_0(dtype, eps):
    o = np.asarray([[3.0, 4.0], [0.0, 0.0]], dtype).reshape(1, 2, 1, 2)
    y, pullback = pa.UnitRows(eps=eps).vjp(o)
    np.testing.assert_array_equal(y[0, :, 0], np.asarray([[0.6, 0.8], [0.0, 0.0]], dtype))
    np.testing.assert_array_equal(pullback(np.ones_like(o))["o"][0, 1, 0], [1.0, 1.0])


# Masks and zero rows


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("eps", [0, 1e-6])
def test_zero_values_give_zero_output_and_a_finite_gradient(eps, detach):
    p = Problem(s=6, n=2, group=2)
    v = p.v.copy()
    v[:, :3] = 0  # The values that the first three rows attend to.
    layer = pa.RowNormalized(eps=eps, detach=detach)
    out, pullback = layer.vjp(p.q, p.k, v)
    assert np.all(out[:, :3] == 0)
    assert_close(length(out[:, 3:]), 1.0)
    gradients = pullback(p.like_output())
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())
    out, pullback = layer.vjp(p.q, p.k, 0 * v)
    assert np.all(out == 0)
    dy = p.like_output()
    gradients = pullback(dy)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())
    assert np.all(gradients["q"] == 0)
    assert np.all(gradients["k"] == 0)
    if eps:
        expected = pa.Softmax().vjp(p.q, p.k, 0 * v)[1](dy / eps)["v"]
        assert_close(gradients["v"], expected)


# Conditioning. A is the output of attention for one head, n × e, and CA that with unit rows


def singular_values(a):
    return np.linalg.svd(a, compute_uv=False)


def kappa(a):
    return singular_values(a)[0] / singular_values(a)[-1]


def log_mu(a, norm=None):
    """log of 2/(σ₁⋯σ_k) (‖A‖_F / √k)^k, or with another number in place of ‖A‖_F."""
    sigma = singular_values(a)
    norm = np.sqrt(np.sum(a * a)) if norm is None else norm
    k = len(sigma)
    return np.log(2) - np.sum(np.log(sigma)) + k * np.log(norm / np.sqrt(k))


def mu(a):
    return np.exp(log_mu(a))


def before_and_after(q, k, v, base):
    """A and CA, from arrays of a single head and sequence."""
    arrays = [np.asarray(x)[None, :, None] for x in (q, k, v)]
    return base(*arrays)[0, :, 0], pa.RowNormalized(base, eps=0)(*arrays)[0, :, 0]


matrices = given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 9),
    e=st.integers(1, 6),
    sharpness=st.sampled_from([1.0, 4.0]),
    causal=st.booleans(),
)


def random_matrices(seed, n, e, sharpness, causal):
    rng = np.random.default_rng(seed)
    q, k = np.sqrt(sharpness) * rng.normal(size=(2, n, 8))
    v = rng.normal(size=(n, e)) * rng.uniform(0.1, 10)
    a, ca = before_and_after(q, k, v, pa.Softmax(causal=causal))
    assume(kappa(a) < 1e5)
    assume(kappa(ca) < 1e5)
    return v, a, ca


@matrices
def test_theorem_4_2_bounds_the_condition_number(**drawn):
    """κ(A) ≤ μ(A) is true. With unit rows ‖CA‖_F = √n, so μ(CA) depends on the determinant only."""
    _, a, ca = random_matrices(**drawn)
    n, k = len(ca), min(ca.shape)
    from_rows_of_length_one = log_mu(ca, norm=np.sqrt(n))
    assert abs(log_mu(ca) - from_rows_of_length_one) <= 1e-9
    for matrix, bound in [(a, log_mu(a)), (ca, from_rows_of_length_one)]:
        assert np.log(kappa(matrix)) <= bound + 1e-9
        if k == 1:
            assert abs(bound - np.log(2)) <= 1e-9
        if k == 2:
            assert abs(np.exp(bound) / (kappa(matrix) + 1 / kappa(matrix)) - 1) <= 1e-9


@matrices
def test_theorem_4_3_bounds_the_condition_number_by_the_values(**drawn):
    """κ(A) ≤ 2/(σ₁⋯σ_k) (√(n/k) ‖v‖_F)^k, which is true as ‖A‖_F ≤ √n ‖v‖_F for a softmax.

    Both sides are invariant under v → cv; so it does not follow, as the paper states, that
    ‖v‖_F > 1 leads to a high condition number.
    """
    v, a, _ = random_matrices(**drawn)
    bound = log_mu(a, norm=np.sqrt(len(a)) * np.sqrt(np.sum(v * v)))
    assert log_mu(a) <= bound + 1e-9
    assert np.log(kappa(a)) <= bound + 1e-9


def test_the_bound_of_theorem_4_3_equals_mu_for_a_single_value():
    q, k, v = np.full((5, 1), 60.0), np.zeros((5, 1)), np.zeros((5, 1))
    k[0], v[0] = 1, 3
    a, _ = before_and_after(q, k, v, pa.Softmax())
    bound = log_mu(a, norm=np.sqrt(5) * 3)
    assert abs(np.exp(bound) - 2) <= 1e-9
    assert abs(mu(a) - 2) <= 1e-9


@matrices
def test_with_no_more_tokens_than_channels_mu_does_not_increase(**drawn):
    """log μ(A) − log μ(CA) = n (log RMS(r) − mean log r) ≥ 0 for n ≤ e, r being the row norms."""
    drawn["n"] = min(drawn["n"], drawn["e"])
    _, a, ca = random_matrices(**drawn)
    r = length(a)
    fall = len(a) * (np.log(np.sqrt(np.mean(r * r))) - np.mean(np.log(r)))
    assert fall >= -1e-12
    assert abs(log_mu(a) - log_mu(ca) - fall) <= 1e-8


def test_the_condition_number_may_rise_although_mu_falls():
    """The example is one of 400 seeds; κ from 437 to 531, while μ falls."""
    rng = np.random.default_rng(59)
    q, k = rng.normal(size=(2, 4, 4))
    a, ca = before_and_after(q, k, rng.normal(size=(4, 4)), pa.Softmax(causal=False))
    assert log_mu(ca) < log_mu(a) - 1
    assert kappa(ca) > 1.2 * kappa(a)


@pytest.mark.parametrize("causal", [True, False])
def test_theorem_4_4_is_false_where_tokens_outnumber_channels(causal):
    """μ(CA) ≤ μ(A) is claimed for every A; here μ rises from 2 to 3.6, and κ from 1 to √11.

    Eleven queries read the value (1, 0) and one reads (0, √11), so that A has orthogonal columns
    of equal length: κ is 1. With unit rows their lengths are √11 and 1. The softmax weights are
    exact to e⁻⁴⁰, and the example holds under a causal mask too.
    """
    k = np.array([[1.0, 0.0]] * 11 + [[0.0, 1.0]])
    v = k * np.array([1.0, np.sqrt(11)])
    a, ca = before_and_after(40 * k, k, v, pa.Softmax(scale=1.0, causal=causal))
    assert abs(kappa(a) - 1) <= 1e-9
    assert abs(mu(a) - 2) <= 1e-9
    assert abs(kappa(ca) - np.sqrt(11)) <= 1e-9
    assert abs(mu(ca) - (np.sqrt(11) + 1 / np.sqrt(11))) <= 1e-9


def test_theorem_4_4_is_false_for_smooth_weights_too():
    """Normal queries, keys and values, 12 × 2; one of 1000 seeds: κ from 1.97 to 3.59."""
    rng = np.random.default_rng(230)
    q, k = rng.normal(size=(2, 12, 2))
    v = rng.normal(size=(12, 2))
    a, ca = before_and_after(q, k, v, pa.Softmax(causal=False))
    assert kappa(ca) > 1.5 * kappa(a)
    assert mu(ca) > 1.5 * mu(a)


def test_theorem_4_4_is_false_for_most_random_heads_of_a_usual_size():
    """512 tokens, 64 channels, the usual scale, no mask: μ rises for each of these seeds."""
    for seed in range(3):
        rng = np.random.default_rng(seed)
        q, k, v = rng.normal(size=(3, 512, 64))
        a, ca = before_and_after(q, k, v, pa.Softmax(causal=False))
        assert log_mu(ca) > log_mu(a) + 0.1


# Caches


def test_the_row_norm_adds_nothing_to_the_cache():
    p = Problem(s=4)
    for text, stored in [("row_normalized", ["k", "v"]), ("row_normalized(laser)", ["k", "v"])]:
        cache = pa.parse(text).init_cache(p.q, p.k, p.v, capacity=4)
        assert sorted(cache.store) == stored
    with_norm, without = (
        pa.parse(text).init_cache(p.q, p.k, p.v, capacity=4).store
        for text in ("row_normalized(lucid)", "lucid")
    )
    shapes = [sorted(buffer.shape for buffer in store.values()) for store in (with_norm, without)]
    assert shapes[0] == shapes[1]


# Construction


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("value", [2e38, 1e-30])
def test_rows_of_any_size_are_normalised_to_length_one(axis, value):
    o = np.full((1, 4, 1, 4), value, dtype=np.float32)
    out = pa.UnitRows(eps=0, axis=axis)(o)
    np.testing.assert_allclose(out, 0.5, rtol=1e-6)


def test_a_packed_segment_of_huge_rows_does_not_affect_its_neighbour():
    o = np.ones((1, 4, 1, 2), dtype=np.float32)
    o[:, 2:] = 1e25
    out = pa.UnitRows(axis="channel")(o, segment_ids=np.asarray([[0, 0, 1, 1]]))
    np.testing.assert_allclose(out, 0.5**0.5, rtol=1e-6)
