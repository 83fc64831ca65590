"""Temperature, per-dimension scale, QK-norm and CCQ at their limits.

The definitions are scores s⟨q, k⟩/τ, queries q ∘ softplus(p)/ln 2, and norm(q), norm(k) with norm
the root-mean-square norm or the layer norm without bias. Outputs and gradients are compared
in `test_definitions.py`. Everything is float64, so an identity has to hold to 1e-10 of the largest
number involved.
"""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.definitions import definition
from tests.mathematics.identities import assert_close
from tests.mathematics.problems import Problem, keys_of

NORMS = ["rms", "layer"]


def test_low_temperatures_select_the_best_key():
    p = Problem(s=7, t=5, n=2, group=2)
    cold = pa.Temperature(pa.Softmax(causal=False))(p.q, p.k, p.v, tau=np.asarray(1e-13))
    best = np.argmax(np.einsum("bthd,bshd->bths", p.q, np.repeat(p.k, 2, axis=2)), axis=-1)
    v = np.repeat(p.v, 2, axis=2)
    assert_close(cold, np.take_along_axis(v, best[..., None], axis=1), size=10)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("values", [(1e3, 1e3, 1e3), (-1e3, -1e3, -1e3), (1e3, 0.0, -1e3)])
def test_enormous_scales_stay_finite_and_exact(values, normalize):
    p = Problem(s=5, n=2, group=2)
    per_dim, layer = np.array(values), pa.PerDimScale(normalize=normalize)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        out, pullback = layer.vjp(p.q, p.k, p.v, per_dim=per_dim)
        gradients = pullback(p.like_output())
    scale = np.maximum(per_dim, 0) + np.log(2) * (per_dim == 0)  # softplus, to the last bit.
    scale = scale / np.log(2) if normalize else scale
    assert_close(out, pa.Softmax()(scale * p.q, p.k, p.v), size=1e3)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())
    assert np.all(gradients["per_dim"][per_dim < 0] == 0)
    assert np.all(gradients["q"][..., per_dim < 0] == 0)


@pytest.mark.parametrize("value", [1e3, -1e3])
def test_torch_differentiates_enormous_scales(value):
    torch = pytest.importorskip("torch")
    p = Problem(s=5)
    q, k, v = (torch.tensor(x) for x in (p.q, p.k, p.v))
    per_dim = torch.full((3,), value, dtype=torch.float64, requires_grad=True)
    pa.PerDimScale()(q, k, v, per_dim=per_dim).sum().backward()
    _, pullback = pa.PerDimScale().vjp(p.q, p.k, p.v, per_dim=np.full(3, value))
    expected = pullback(np.ones((*p.q.shape[:3], 2)))["per_dim"]
    assert np.all(np.isfinite(expected))
    assert_close(per_dim.grad.numpy(), expected, size=1)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("zero", "eps"), [("q", 0), ("k", 1e-6), ("qk", 0), ("qk", 1e-6)])
@pytest.mark.parametrize("text", ["qk_norm", "lucid(qk_norm)", "qk_norm(path)"])
def test_zero_queries_and_keys_have_scores_of_zero_and_finite_gradients(text, zero, eps, norm):
    p = Problem(s=6, n=2, group=2)
    layer = pa.parse(text.replace("qk_norm", f"qk_norm[norm={norm},eps={eps},gain=true]"))
    x = p.x(layer)
    for name in zero:
        x[name] = x[name].copy()
        x[name][:, [0, 3, 4]] = 0
        if norm == "layer":
            x[name][:, 4] = 7.0  # Only the mean is left.
    out, pullback = layer.vjp(**x)
    filled = {name: np.where(array == 7.0, 0, array) for name, array in x.items()}
    assert_close(out, definition(layer, filled)[0].real, size=10)
    gradients = pullback(p.like_output())
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())


def operator(k, lam, decay, g):
    """I − λΣ of every token and key head, (b, s, n, d, d), by applying it to the basis vectors."""
    b, s, n, d = k.shape
    q = np.broadcast_to(np.tile(np.eye(d), (n, 1)), (b, s, n * d, d)).copy()
    gates = {} if g is None else {"g": np.repeat(g, d, axis=2) if decay == "head" else g}
    contraction = np.full((b, s, n * d), float(lam))
    out = pa.ConditionedQuery(decay=decay, eps=0.0)(q, k, contraction=contraction, **gates)
    return out.reshape(b, s, n, d, d)


def of_unit_length(x):
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
    assert np.abs(piece(**x) - of_unit_length(x["q"])).max() <= 1e-10


def test_at_a_low_temperature_one_key_dominates_and_the_covariance_is_zero():
    x = Problem(s=7, n=2, group=2).x(pa.ConditionedQuery())
    assert_close(pa.QueryWeightedQuery(tau=1e-5, eps=0.0)(**x), of_unit_length(x["q"]))


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
