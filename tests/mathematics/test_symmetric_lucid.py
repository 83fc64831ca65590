"""Solves by iteration: LUCID without causality, and Mesa's queries, in the blocked backends.

(Φ + ρ I) y = v with Φ_ij = exp(s ⟨RN(k_i), RN(k_j)⟩ − s d), Φ_ii = 1, and o = softmax(s q kᵀ) y.
"""

import numpy as np
import pytest

import precondattn as pa
from precondattn_portable import symmetric_lucid
from tests.mathematics import identities
from tests.mathematics.definitions import definition
from tests.mathematics.problems import keys_of


@pytest.fixture(autouse=True)
def iterations(monkeypatch):
    """Longer sequences than this are solved by iteration."""
    monkeypatch.setattr(symmetric_lucid, "DIRECT", 8)


def problem(kind="random", b=2, s=19, h=4, n=2, d=8, e=5):
    rng = np.random.default_rng(0)
    q, v = rng.normal(size=(b, s, h, d)), rng.normal(size=(b, s, n, e))
    return {"q": q, "k": keys_of(rng, kind, (b, s, n, d)), "v": v}


def of_mesa():
    x, rng = problem(n=4, s=90), np.random.default_rng(1)
    x["k"] /= np.linalg.vector_norm(x["k"], axis=-1, keepdims=True)
    x |= {"g": -0.1 * rng.uniform(size=(2, 90, 4)), "beta_mesa": rng.uniform(size=(2, 90, 4))}
    return x | {"lam_mesa": 0.25 + rng.uniform(size=(4, 8))}


def assert_close(actual, expected, times=1):
    """Equality to 1e-10, times what an ill-conditioned matrix makes of it."""
    identities.assert_close(actual, expected, times * np.max(np.abs(expected)))


def lucid(**options):
    return pa.Lucid(pa.Softmax(causal=False), **options)


@pytest.mark.parametrize("kind", ["random", "clustered", "duplicate", "zero"])
def test_it_is_attention_to_values_times_a_dense_inverse(kind):
    x = problem(kind)
    for m in (lucid(), lucid(rho=0.2, scale=0.5)):
        assert_close(m(**x, backend="portable"), definition(m, x)[0].real, times=10)


def test_many_blocks_are_the_definition_for_clustered_keys():
    x = problem("clustered", b=1, s=700, h=2, e=16)
    assert_close(lucid()(**x, backend="portable"), lucid()(**x), times=100)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_tiny_and_huge_values_are_solved(size):
    x = problem()
    scaled = {**x, "v": size * x["v"]}
    assert_close(lucid()(**scaled, backend="portable") / size, lucid()(**x))


def test_nan_in_a_value_stays_in_its_sequence():
    x = problem()
    expected = lucid()(**x)
    x["v"][0, 3] = np.nan
    out = lucid()(**x, backend="portable")
    assert np.all(np.isnan(out[0]))
    assert_close(out[1], expected[1])


@pytest.mark.parametrize(
    ("made", "x"),
    [(lucid, problem("clustered", s=40)), (lambda **o: pa.Mesa(beta=True, **o), of_mesa())],
    ids=["lucid", "mesa"],
)
def test_a_residual_that_is_not_reached_raises_and_is_nan_in_jax(made, x):
    few = {"iterations": 2}
    with pytest.raises(pa.NotSolvedError, match=r"residual of .* after 2 iterations, and 1e-13"):
        made(**few)(**x, backend="portable")
    made(**few, tolerance=100.0)(**x, backend="portable")
    jax = pytest.importorskip("jax")
    x = {name: jax.numpy.asarray(a) for name, a in x.items()}
    assert np.any(np.isnan(made(iterations=1)(**x, backend="jax")))
    assert np.all(np.isfinite(made()(**x, backend="jax")))
