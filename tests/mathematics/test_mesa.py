"""Mesa against a solve per token, and against identities that hold for any implementation.

q*_t = (H_t + diag λ)⁻¹ q_t with H_t = e^{g_t} H_{t−1} + β_t k_t k_tᵀ. Everything is float64.
"""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.definitions import assert_is_defined
from tests.mathematics.identities import assert_close


def problem(seed=0, b=2, s=90, h=2, d=6, e=5, duplicate=False):
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, b, s, h, d))
    if duplicate:
        k = k[:, rng.integers(2, size=s)]
    return {
        "q": q,
        "k": k / np.linalg.vector_norm(k, axis=-1, keepdims=True),
        "v": rng.normal(size=(b, s, h, e)),
        "g": -0.1 * rng.uniform(size=(b, s, h)),
        "beta_mesa": rng.uniform(size=(b, s, h)),
        "lam_mesa": 0.25 + rng.uniform(size=(h, d)),
    }


MESA = pa.Mesa(pa.SSD(), beta=True)


@pytest.mark.parametrize("duplicate", [False, True])
def test_many_tokens_with_equal_keys_are_those_of_the_definition(duplicate):
    x = problem(duplicate=duplicate)
    assert_is_defined(MESA, x)
    shapes = {n.partition("(")[0]: a.shape for n, a in MESA.init_cache(**x).store.items()}
    assert shapes["mesa_moment"] == (2, 2, 6, 6)


@pytest.mark.parametrize("base", ["linear", "gla", "retention", "gated_delta"])
def test_with_a_large_lambda_it_is_the_base_divided_by_lambda(base):
    m, rng = pa.parse(base), np.random.default_rng(0)
    x = {n: a for n, a in problem().items() if n in m.inputs}
    if base == "gla":
        x["g"] = -rng.uniform(size=x["k"].shape)
    if base == "gated_delta":
        x["beta"] = rng.uniform(size=x["k"].shape[:3])
    out = pa.Mesa(m)(**x, lam_mesa=np.full((2, 6), 1e12))
    assert_close(1e12 * out, m(**x))


def test_the_query_of_ccq_is_its_first_order():
    """(I + C)⁻¹ q = q − C q + O(C²), with C the second moment as CCQ's weights scale it."""
    x = problem()
    unit = {"q": x["q"] / np.linalg.vector_norm(x["q"], axis=-1, keepdims=True), "k": x["k"]}
    # Keys and their opposites have no mean, so that CCQ's covariance is the second moment.
    for name in unit:
        unit[name] = np.concatenate([unit[name], unit[name]], axis=1)
    unit["k"][:, 90:] *= -1
    last = {}
    for size in (0.1, 0.01):
        full = np.full((2, 180, 2), size)
        ccq = pa.ConditionedQuery(eps=0)(**unit, contraction=full)[:, -1]
        # n λ in place of λ: CCQ's covariance is a mean of n keys, and H is a sum.
        ridge = np.full((2, 6), 180 / size)
        mesa = ridge[0, 0] * pa.MesaQuery()(**unit, lam_mesa=ridge)[:, -1]
        last[size] = np.max(np.abs(ccq - mesa))
    assert last[0.1] <= 0.1**2
    assert 50 < last[0.1] / last[0.01] < 150  # The error is of second order.


def test_a_residual_that_is_not_reached_raises():
    x = problem()
    with pytest.raises(pa.NotSolvedError, match="after 2 iterations, and 1e-13 is expected"):
        pa.Mesa(beta=True, iterations=2)(**x, backend="portable")
    pa.Mesa(beta=True, iterations=2, tolerance=10.0)(**x, backend="portable")


def test_in_jax_a_query_whose_residual_is_not_reached_is_nan():
    jax = pytest.importorskip("jax")
    x = {name: jax.numpy.asarray(a) for name, a in problem().items()}
    out = np.asarray(pa.Mesa(beta=True, iterations=1)(**x, backend="jax"))
    assert np.any(np.isnan(out))
    assert np.all(np.isfinite(MESA(**x, backend="jax")))
