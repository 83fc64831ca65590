"""Temperature, per-dimension scale and QK-norm, which act on queries and keys before the scores,
against identities that hold for any implementation.

The definitions are scores s⟨q, k⟩/τ, queries q ∘ softplus(p)/ln 2, and norm(q), norm(k) with norm
the root-mean-square norm or the layer norm without bias. Outputs and gradients are compared
in `test_definitions.py`. Everything is float64, so an identity has to hold to 1e-10 of the largest
number involved.
"""

import numpy as np
import pytest
from hypothesis import given

import precondattn as pa
from tests.mathematics.definitions import definition
from tests.mathematics.identities import assert_close, part
from tests.mathematics.problems import Problem, problems

NORMS = ["rms", "layer"]


# The definitions


# Temperature


@given(problems(square=False))
def test_low_temperatures_select_the_best_key_and_high_ones_give_the_mean(p):
    layer = pa.Temperature(pa.Softmax(causal=False))
    hot = layer(p.q, p.k, p.v, tau=np.asarray(1e13))
    mean = np.repeat(p.v.mean(1, keepdims=True), p.group, axis=2)
    assert_close(hot, mean, size=10)
    cold = layer(p.q, p.k, p.v, tau=np.asarray(1e-13))
    best = np.argmax(
        np.einsum("bthd,bshd->bhts", p.q, np.repeat(p.k, p.group, axis=2)), axis=-1
    ).transpose(0, 2, 1)[..., None]
    assert_close(cold, np.take_along_axis(np.repeat(p.v, p.group, axis=2), best, axis=1), size=10)


# A scale for each dimension


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


# Norms of queries and keys


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("eps", [0, 1e-6])
@pytest.mark.parametrize("zero", ["q", "k", "qk"])
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


@pytest.mark.parametrize("height", [1e-3, 1.0, 1e3, 1e100])
def test_scores_are_bounded_however_long_queries_and_keys(height):
    """|s⟨norm(q), norm(k)⟩| ≤ √d, so that no weight is below e^(−2√d)/n."""
    p = Problem(s=6, d=4)
    eye = np.broadcast_to(np.eye(6)[:, None], (2, 6, 1, 6)).copy()
    for norm in NORMS:
        weights = pa.QKNorm(pa.Softmax(causal=False), norm=norm)(height * p.q, height * p.k, eye)
        assert weights.min() >= np.exp(-2 * np.sqrt(4)) / 6
    if height >= 1e3:
        assert pa.Softmax(causal=False)(height * p.q, height * p.k, eye).min() == 0


# Around and inside LUCID and LASER


@pytest.mark.parametrize("text", ["lucid({})", "{}(lucid)"])
@pytest.mark.parametrize("height", [1e-3, 1.0, 1e3])
@given(p=problems(["duplicate"], longest=16, square=True))
def test_lucid_over_normalised_keys_is_bounded_whatever_the_gain(text, height, p):
    """|P_ij| ≤ 1 for the inverse P, and so for A P, A having rows that sum to one."""
    layer = pa.parse(text.format("qk_norm[gain=true]"))
    b, s, n, _ = p.k.shape
    eye = np.broadcast_to(np.eye(s)[:, None], (b, s, n, s)).copy()
    matrix = layer(**p.x(layer, v=eye, k_gain=height * p.rng.normal(size=p.k.shape[-1])))
    assert np.abs(matrix).max() <= 1 + 1e-10


# Caches


def test_temperatures_and_scales_are_not_in_the_cache_and_may_change():
    p = Problem(s=5)
    layer = pa.Temperature()
    x = p.x(layer)
    cache = layer.init_cache(**x, capacity=5)
    assert sorted(cache.store) == ["k", "v"]
    _, cache = layer.extend(cache, **part(x, slice(0, 4)))
    colder = x | {"tau": np.asarray(0.1)}
    out, _ = layer.extend(cache, **part(colder, slice(4, 5)))
    assert_close(out, layer(**colder)[:, 4:], size=10)
