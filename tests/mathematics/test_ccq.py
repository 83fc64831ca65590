"""CCQ's matrix I − λ Σ: its spectrum, the bounds that follow, and its limits."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.identities import assert_close
from tests.mathematics.problems import Problem, keys_of, problems

PIECES = [
    pa.ConditionedQuery(),
    pa.ConditionedQuery(decay="head", eps=0.0),
    pa.ConditionedQuery(decay="channel"),
    pa.ConditionedQuery(decay="retention"),
    pa.QueryWeightedQuery(),
    pa.QueryWeightedQuery(tau=0.1),
]


def operator(k, lam, decay="none", g=None, eps=0.0):
    """I − λΣ of every token and key head, (b, s, n, d, d), by applying it to the basis vectors."""
    b, s, n, d = k.shape
    q = np.broadcast_to(np.tile(np.eye(d), (n, 1)), (b, s, n * d, d)).copy()
    gates = {} if g is None else {"g": np.repeat(g, d, axis=2) if decay == "head" else g}
    contraction = np.full((b, s, n * d), float(lam))
    out = pa.ConditionedQuery(decay=decay, eps=eps)(q, k, contraction=contraction, **gates)
    return out.reshape(b, s, n, d, d)


def conditioned_query(q, k, lam, piece=None):
    """`ConditionedQuery` with one λ for all tokens and heads, and without ε."""
    piece = piece or pa.ConditionedQuery(eps=0.0)
    return piece(q, k, contraction=np.full(q.shape[:3], float(lam)))


def of_length_1(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize("length", [1, 2, 7, 300])
@pytest.mark.parametrize("kind", ["random", "equal", "clustered", "opposite"])
def test_the_spectrum_lies_between_1_minus_lambda_and_1(decay, length, kind):
    rng = np.random.default_rng(length)
    k = 3 * keys_of(rng, kind, (2, length, 2, 4))
    g = {"none": None, "head": -rng.exponential(1, k.shape[:3])}.get(decay, -rng.random(k.shape))
    for lam in (0.0, 0.1, 0.7, 1.0):
        matrix = operator(k, lam, decay, g)
        assert_close(matrix, matrix.swapaxes(-1, -2), size=0.01)
        eigenvalues = np.linalg.eigvalsh(matrix)
        assert eigenvalues.min() >= 1 - lam - 1e-12
        assert eigenvalues.max() <= 1 + 1e-12


@pytest.mark.parametrize("length", [2, 64, 1000])
def test_both_ends_of_the_spectrum_are_attained(length):
    u = of_length_1(np.random.default_rng(0).normal(size=3))
    k = np.resize([1.0, -1.0], length)[None, :, None, None] * u
    eigenvalues = np.linalg.eigvalsh(operator(k, 0.7)[0, -1, 0])
    assert_close(eigenvalues, np.array([0.3, 1, 1]))
    assert_close(conditioned_query(np.resize(u, k.shape), k, 0.7)[0, -1, 0], 0.3 * u)


@given(problems(["random", "clustered"], square=True))
def test_a_query_orthogonal_to_the_variation_of_the_keys_is_unchanged(p):
    """A query orthogonal to all keys, and a query along the mean where all keys are equal."""
    x = p.x(pa.ConditionedQuery())
    q, k = (np.concatenate([x["q"], 0 * x["q"]], -1), np.concatenate([0 * x["k"], x["k"]], -1))
    assert_close(conditioned_query(q, k, 1), of_length_1(q))
    equal = keys_of(p.rng, "equal", x["k"].shape)
    assert_close(conditioned_query(x["q"], equal, 1), of_length_1(x["q"]))


@pytest.mark.parametrize("piece", PIECES, ids=str)
@given(p=problems())
def test_a_query_gets_shorter_by_no_more_than_lambda(piece, p):
    x = p.x(piece)
    square = np.sum(x["q"] ** 2, axis=-1)
    before = np.sqrt(square / (square + piece.eps))
    after = np.linalg.norm(piece(**x), axis=-1)
    assert np.all(after <= before + 1e-12)
    assert np.all(after >= (1 - x["contraction"]) * before - 1e-12)


@given(problems(["random", "clustered", "opposite"], square=True), st.floats(0, 1))
def test_the_trace_of_the_covariance_is_1_minus_the_squared_mean(p, lam):
    k = p.x(pa.ConditionedQuery())["k"]
    s, d = k.shape[1], k.shape[-1]
    mean = np.cumsum(of_length_1(k), axis=1) / np.arange(1, s + 1)[:, None, None]
    trace = np.trace(operator(k, lam), axis1=-2, axis2=-1)
    assert_close(trace, d - lam * (1 - np.sum(mean**2, axis=-1)))


@pytest.mark.parametrize("d", [1, 3, 16])
def test_isotropic_keys_contract_by_lambda_over_d_only(d):
    k = np.concatenate([np.eye(d), -np.eye(d)])[None, :, None]
    assert_close(operator(k, 0.8)[0, -1, 0], (1 - 0.8 / d) * np.eye(d))


@given(st.integers(0, 2**32 - 1), st.floats(0.01, 1), st.floats(0, 1), st.integers(1, 20))
def test_the_shift_of_the_margin_is_that_of_equation_26(seed, rho, lam, pairs):
    """Eq. 26: λρ(β − α)(u·q) is exact if Σ = ρ u uᵀ, as of keys √(1 − ρ) w ± √ρ u, w ⟂ u."""
    rng = np.random.default_rng(seed)
    u, w = np.linalg.qr(rng.normal(size=(5, 5)))[0][:2]
    signs = np.tile([1.0, -1.0], pairs)[:, None]
    k = np.sqrt(1 - rho) * w + np.sqrt(rho) * signs * u
    q, target, distractor = of_length_1(rng.normal(size=(3, 5)))
    out = conditioned_query(np.resize(q, (1, 1, 1, 5)), k[None, :, None], lam)[0, 0, 0]
    shift = lam * rho * (distractor @ u - target @ u) * (u @ q)
    assert_close((target - distractor) @ out, (target - distractor) @ q + shift, size=1)


@pytest.mark.parametrize("lam", [1e-3, 1e-2, 0.1])
def test_ccq_is_the_first_order_of_a_regularised_inverse(lam):
    """(I + λΣ)⁻¹ q̄, as MesaNet would read, differs by λ²Σ² (I + λΣ)⁻¹ q̄, at most λ²."""
    k = np.random.default_rng(7).normal(size=(1, 9, 1, 4))
    contracted = operator(k, lam)[0, -1, 0]
    covariance = (np.eye(4) - contracted) / lam
    inverse = np.linalg.inv(np.eye(4) + lam * covariance)
    assert_close(inverse - contracted, lam**2 * covariance @ covariance @ inverse, size=1)
    assert np.linalg.norm(inverse - contracted, 2) <= lam**2


@pytest.mark.parametrize("decay", ["head", "channel"])
@given(p=problems(kinds=("random", "clustered")))
def test_with_closed_gates_the_covariance_is_zero(decay, p):
    piece = pa.ConditionedQuery(decay=decay)
    x = p.x(piece)
    x["g"] = x["g"] * 0 - 1e4
    expected = x["q"] / np.sqrt(np.sum(x["q"] ** 2, axis=-1, keepdims=True) + 1e-6)
    assert np.abs(piece(**x) - expected).max() <= 1e-10


@given(problems())
def test_at_a_high_temperature_all_keys_have_equal_weight(p):
    x = p.x(pa.ConditionedQuery())
    assert_close(pa.QueryWeightedQuery(tau=1e12)(**x), pa.ConditionedQuery()(**x), size=1)


def test_at_a_low_temperature_one_key_dominates_and_the_covariance_is_zero():
    p = Problem(s=7, n=2, group=2)
    x = p.x(pa.ConditionedQuery())
    cold = pa.QueryWeightedQuery(tau=1e-5, eps=0.0)(**x)
    assert_close(cold, of_length_1(x["q"]))


def log_partition_hessian(k, at, tau=1.0):
    """∇² log Σ_j exp(k_j·q/τ), by central differences of its gradient."""

    def gradient(q):
        scores = k @ q / tau
        p = np.exp(scores - scores.max())
        return p @ k / p.sum() / tau

    step, d = 1e-5, len(at)
    sides = [(gradient(at + e) - gradient(at - e)) / (2 * step) for e in step * np.eye(d)]
    return np.stack(sides)


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 5), st.floats(0.5, 3))
def test_the_covariance_is_the_hessian_of_the_log_partition(seed, s, d, tau):
    """The running covariance: at 0. The query-weighted one: at q̄, multiplied by τ²."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(1, 1, 1, d)), rng.normal(size=(1, s, 1, d))
    unit_q, unit_k = of_length_1(q)[0, 0, 0], of_length_1(k)[0, :, 0]
    for piece, at, temperature in [
        (pa.ConditionedQuery(eps=0.0), 0 * unit_q, 1.0),
        (pa.QueryWeightedQuery(eps=0.0), unit_q, 1.0),
        (pa.QueryWeightedQuery(tau=tau, eps=0.0), unit_q, tau),
    ]:
        sigma = temperature**2 * log_partition_hessian(unit_k, at, temperature)
        out = conditioned_query(q, k, 0.9, piece)[0, 0, 0]
        assert np.abs(out - (unit_q - 0.9 * sigma @ unit_q)).max() <= 1e-8


@pytest.mark.parametrize("kind", ["random", "opposite"])
def test_with_sums_instead_of_means_the_spectrum_exceeds_the_bound_more_with_every_token(kind):
    """Keys in opposite pairs have mean 0; λt in place of λ gives C in place of C̄."""
    rng, lam, lowest = np.random.default_rng(0), 0.1, []
    half = keys_of(rng, kind, (1, 256, 1, 4))
    k = np.stack([half, -half], axis=2).reshape(1, 512, 1, 4)
    for t in (8, 32, 128, 512):
        unit_k = of_length_1(k[0, :t, 0])
        expected = np.eye(4) - lam * unit_k.T @ unit_k
        with_sums, with_means = (operator(k[:, :t], x)[0, -1, 0] for x in (lam * t, lam))
        assert_close(with_sums, expected)
        assert np.linalg.eigvalsh(with_means).min() >= 1 - lam - 1e-12
        lowest.append(np.linalg.eigvalsh(with_sums).min())
        assert lowest[-1] <= 1 - lam * t / 4 + 1e-10  # The trace of C is t.
    assert all(later < 3 * earlier < 0 for earlier, later in pairwise(lowest[1:]))


@pytest.mark.parametrize(
    ("lam", "flips", "amplifies"),
    [(0.5, False, False), (1.0, False, False), (1.5, True, False), (3.0, True, True)],
)
@pytest.mark.parametrize("rho", [1.0, 0.4])
def test_without_the_sigmoid_a_query_may_flip_and_grow(rho, lam, flips, amplifies):
    """Along the first eigenvector of Σ = ρ u uᵀ the query is multiplied by 1 − λρ."""
    u, w = np.eye(2)
    signs = np.tile([1.0, -1.0], 50)[:, None]
    k = (np.sqrt(1 - rho) * w + np.sqrt(rho) * signs * u)[None, :, None]
    out = conditioned_query(u.reshape(1, 1, 1, 2), k, lam / rho)[0, 0, 0]
    assert_close(out, (1 - lam) * u, size=1)
    assert (out @ u < -1e-10) == flips
    assert (np.linalg.norm(out) > 1) == amplifies


@pytest.mark.parametrize("logit", [-1e3, -2.197, 0.0, 30.0, 1e3])
def test_with_the_gate_the_bound_holds_for_any_weights_and_lengths(logit):
    p = Problem(s=200, d=4)
    x = p.x(pa.ConditionedQuery())
    lam = pa.contraction_gate(x["q"], weight=np.full((1, 4), logit), bias=np.full(1, logit))
    out = pa.ConditionedQuery()(**(x | {"contraction": lam}))
    assert np.linalg.norm(out, axis=-1).max() <= 1 + 1e-12


# The gate that computes λ


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_the_gate_is_the_logistic_of_a_linear_map(eps):
    m = pa.ContractionGate(eps=eps)
    x = Problem(s=7, n=2, group=2).x(m)
    out = m(**x)
    unit = x["q"] / np.sqrt(np.sum(x["q"] ** 2, axis=-1, keepdims=True) + eps)
    logit = np.einsum("bthd,hd->bth", unit, x["weight"]) + x["bias"]
    assert_close(out, 1 / (1 + np.exp(-logit)))
    np.testing.assert_array_equal(out, pa.contraction_gate(**x, eps=eps))


def test_the_gate_starts_at_a_tenth():
    x = Problem(s=3, n=2).x(pa.ContractionGate())
    out = pa.contraction_gate(x["q"], weight=0 * x["weight"], bias=np.full(2, np.log(0.1 / 0.9)))
    assert out.shape == x["q"].shape[:3]
    assert_close(out, np.full(out.shape, 0.1))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_saturated_gate_is_1_or_0_and_its_gradients_are_finite(sign):
    x = Problem(s=3, n=2).x(pa.ContractionGate())
    out, pullback = pa.ContractionGate().vjp(**(x | {"bias": np.full(2, sign * 1e4)}))
    assert_close(out, np.full(out.shape, (1 + sign) / 2), size=1)
    assert all(np.all(np.isfinite(gradient)) for gradient in pullback(0 * out + 1).values())
