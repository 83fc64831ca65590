"""LUCID without causality against a dense inverse, and against identities of any implementation.

(Φ + ρ I) y = v with Φ_ij = exp(s ⟨RN(k_i), RN(k_j)⟩ − s d), Φ_ii = 1, and o = softmax(s q kᵀ) y.
"""

import numpy as np
import pytest

import precondattn as pa
from precondattn_portable import symmetric_lucid
from tests.mathematics import identities

BACKENDS = ["reference", "portable"]
KEYS = ["random", "clustered", "duplicate", "zero"]


@pytest.fixture(autouse=True)
def iterations(monkeypatch):
    """Longer sequences than this are solved by iteration."""
    monkeypatch.setattr(symmetric_lucid, "DIRECT", 8)


def problem(kind="random", seed=0, b=2, s=19, h=4, n=2, d=8, e=5):
    rng = np.random.default_rng(seed)
    k = rng.normal(size=(b, s, n, d))
    if kind == "clustered":
        k = k[:, :1] + 0.05 * k
    elif kind == "duplicate":
        k = k[:, rng.integers(3, size=s)]
    elif kind == "zero":
        k[:, ::2] = 0
    return {"q": rng.normal(size=(b, s, h, d)), "k": k, "v": rng.normal(size=(b, s, n, e))}


def by_inverse(q, k, v, rho=1e-3, scale=None, eps=1e-6, kept=None):
    d, group = k.shape[3], q.shape[2] // k.shape[2]
    scale = d**-0.5 if scale is None else scale
    out = np.zeros((*q.shape[:3], v.shape[3]))
    kept = np.ones(k.shape[:2], dtype=bool) if kept is None else kept
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        some = kept[b]
        keys, values = k[b, some, h // group], v[b, some, h // group]
        unit = keys / np.sqrt(np.mean(keys**2, axis=-1, keepdims=True) + eps)
        phi = np.exp(scale * (unit @ unit.T - d))
        np.fill_diagonal(phi, 1.0 + rho)
        weights = np.exp(d**-0.5 * q[b, some, h] @ keys.T)
        weights /= weights.sum(axis=-1, keepdims=True)
        out[b, some, h] = weights @ np.linalg.inv(phi) @ values
    return out


def assert_close(actual, expected, times=1):
    """Equality to 1e-10, times what an ill-conditioned matrix makes of it."""
    identities.assert_close(actual, expected, times * np.max(np.abs(expected)))


def lucid(backend, x, masks=None, **options):
    return pa.Lucid(pa.Softmax(causal=False), **options)(**x, **(masks or {}), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KEYS)
def test_it_is_attention_to_values_times_a_dense_inverse(kind, backend):
    x = problem(kind)
    assert_close(lucid(backend, x), by_inverse(**x), times=10)
    options = {"rho": 0.2, "scale": 0.5}
    assert_close(lucid(backend, x, **options), by_inverse(**x, **options), times=10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fewer_queries_read_all_solved_values(backend):
    x = problem()
    few = {**x, "q": x["q"][:, 12:]}
    assert_close(lucid(backend, few), by_inverse(**x)[:, 12:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("rho", [1e-3, 0.1, 3.0])
def test_the_inverse_is_symmetric_and_bounded_by_the_reciprocal_of_rho(rho, kind, backend):
    k = problem(kind, n=1)["k"]
    one = np.broadcast_to(np.eye(19)[:, None], (2, 19, 1, 19))
    inverse = pa.SymmetricLucidSolve(rho=rho)(k, one, backend=backend)[:, :, 0]
    assert_close(inverse, np.swapaxes(inverse, 1, 2), times=100)
    values = np.linalg.eigvalsh(inverse)
    assert values.max() <= (1 + 1e-8) / rho
    assert values.min() >= (1 - 1e-8) / (19 + rho)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_keys_share_the_sum_of_their_values_and_divide_differences_by_rho(backend):
    v = np.random.default_rng(0).normal(size=(1, 12, 1, 3))
    y = pa.SymmetricLucidSolve(rho=0.25, eps=0)(np.ones((1, 12, 1, 8)), v, backend=backend)
    mean = v.mean(axis=1, keepdims=True)
    assert_close(y, mean / 12.25 + (v - mean) / 0.25)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_large_rho_divides_values_by_it(backend):
    x = problem()
    assert_close(1e9 * lucid(backend, x, rho=1e9), pa.Softmax(causal=False)(**x), times=1000)


def test_many_blocks_are_the_definition_for_clustered_keys():
    x = problem("clustered", b=1, s=700, h=2, e=16)
    assert_close(lucid("portable", x), lucid("reference", x), times=100)


def test_a_residual_that_is_not_reached_raises():
    x = problem("clustered", s=40)
    with pytest.raises(pa.NotSolvedError, match=r"residual of .* after 2 iterations, and 1e-13"):
        lucid("portable", x, iterations=2)
    lucid("portable", x, iterations=2, tolerance=100.0)


def test_in_jax_a_column_whose_residual_is_not_reached_is_nan(monkeypatch):
    jax = pytest.importorskip("jax")
    x = {name: jax.numpy.asarray(a) for name, a in problem("clustered", s=40).items()}
    assert np.all(np.isnan(lucid("jax", x, iterations=2)))
    assert np.all(np.isfinite(lucid("jax", x)))


def test_nan_in_a_value_stays_in_its_sequence():
    x = problem()
    x["v"][0, 3] = np.nan
    out = lucid("portable", x)
    assert np.all(np.isnan(out[0]))
    assert_close(out[1], by_inverse(**x)[1])


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_tiny_and_huge_values_are_solved(size):
    x = problem()
    scaled = {**x, "v": size * x["v"]}
    assert_close(lucid("portable", scaled) / size, lucid("reference", x))


def test_a_window_would_make_the_matrix_indefinite():
    near = np.abs(np.subtract.outer(np.arange(6), np.arange(6))) < 3
    assert np.linalg.eigvalsh(near * np.ones((6, 6))).min() < -0.1
