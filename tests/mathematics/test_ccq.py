"""CCQ's matrix I − λ Σ for long sequences, and its gates at their limits."""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.identities import assert_close
from tests.mathematics.problems import Problem, keys_of


def operator(k, lam, decay, g):
    """I − λΣ of every token and key head, (b, s, n, d, d), by applying it to the basis vectors."""
    b, s, n, d = k.shape
    q = np.broadcast_to(np.tile(np.eye(d), (n, 1)), (b, s, n * d, d)).copy()
    gates = {} if g is None else {"g": np.repeat(g, d, axis=2) if decay == "head" else g}
    contraction = np.full((b, s, n * d), float(lam))
    out = pa.ConditionedQuery(decay=decay, eps=0.0)(q, k, contraction=contraction, **gates)
    return out.reshape(b, s, n, d, d)


def of_length_1(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize(
    ("kind", "length"), [("random", 2), ("equal", 7), ("clustered", 300), ("opposite", 300)]
)
def test_the_spectrum_lies_between_1_minus_lambda_and_1(decay, length, kind):
    rng = np.random.default_rng(length)
    k = 3 * keys_of(rng, kind, (2, length, 2, 4))
    g = {"none": None, "head": -rng.exponential(1, k.shape[:3])}.get(decay, -rng.random(k.shape))
    for lam in (0.1, 1.0):
        matrix = operator(k, lam, decay, g)
        assert_close(matrix, matrix.swapaxes(-1, -2), size=0.01)
        eigenvalues = np.linalg.eigvalsh(matrix)
        assert eigenvalues.min() >= 1 - lam - 1e-12
        assert eigenvalues.max() <= 1 + 1e-12


@pytest.mark.parametrize("kind", ["random", "clustered"])
@pytest.mark.parametrize("decay", ["head", "channel"])
def test_with_closed_gates_the_covariance_is_zero(decay, kind):
    piece = pa.ConditionedQuery(decay=decay, eps=0.0)
    x = Problem(0, kind, s=7, n=2, group=2).x(piece)
    x["g"] = x["g"] * 0 - 1e4
    assert np.abs(piece(**x) - of_length_1(x["q"])).max() <= 1e-10


def test_at_a_low_temperature_one_key_dominates_and_the_covariance_is_zero():
    x = Problem(s=7, n=2, group=2).x(pa.ConditionedQuery())
    assert_close(pa.QueryWeightedQuery(tau=1e-5, eps=0.0)(**x), of_length_1(x["q"]))


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_the_gate_is_the_logistic_of_a_linear_map(eps):
    m = pa.ContractionGate(eps=eps)
    x = Problem(s=7, n=2, group=2).x(m)
    out = m(**x)
    unit = x["q"] / np.sqrt(np.sum(x["q"] ** 2, axis=-1, keepdims=True) + eps)
    logit = np.einsum("bthd,hd->bth", unit, x["weight"]) + x["bias"]
    assert_close(out, 1 / (1 + np.exp(-logit)))
    np.testing.assert_array_equal(out, pa.contraction_gate(**x, eps=eps))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_saturated_gate_is_1_or_0_and_its_gradients_are_finite(sign):
    x = Problem(s=3, n=2).x(pa.ContractionGate())
    out, pullback = pa.ContractionGate().vjp(**(x | {"bias": np.full(2, sign * 1e4)}))
    assert_close(out, np.full(out.shape, (1 + sign) / 2), size=1)
    assert all(np.all(np.isfinite(gradient)) for gradient in pullback(0 * out + 1).values())
