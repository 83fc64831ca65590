"""Temperature, per-dimension scale and QK-norm, which act on queries and keys before the scores,
against identities that hold for any implementation.

The definitions are scores s⟨q, k⟩/τ, queries q ∘ softplus(p)/ln 2, and norm(q), norm(k) with norm
the root-mean-square norm or the layer norm without bias. Everything is float64, so an identity has
to hold to 1e-10 of the largest number involved, and a gradient to 1e-7 of central differences.
"""

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.identities import (
    assert_close,
    part,
)
from tests.mathematics.loops import dot_scores, path_scores, read_causal, solved_values

sampled = settings(
    max_examples=15, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
LAYERS = [
    "temperature",
    "temperature[per=head]",
    "per_dim_scale",
    "per_dim_scale[normalize=false]",
    "per_dim_scale(temperature[per=head])",
    "qk_norm",
    "qk_norm[norm=layer,eps=0.1]",
    "qk_norm[gain=true]",
    "qk_norm[norm=layer,gain=true](softmax[window=3])",
    "qk_norm[gain=true](temperature)",
    "laser(temperature[per=head])",
    "laser(qk_norm[norm=layer])",
    "temperature(laser(per_dim_scale))",
    "lucid(temperature[per=head])",
    "per_dim_scale(lucid)",
    "lucid(qk_norm[gain=true])",
    "qk_norm[norm=layer,gain=true](lucid)",
    "lucid[normalize=none](qk_norm[gain=true])",
    "lucid[normalize=rows](qk_norm)",
    "temperature[per=head](path)",
    "per_dim_scale(path)",
    "qk_norm[gain=true](path)",
]
NORMS = ["rms", "layer"]


class QuerySideProblem:
    """Random inputs of everything in `LAYERS`."""

    def __init__(self, rng, *, t, s=None, n=1, group=1, d=3, b=2):
        s = t if s is None else s
        self.rng, self.group, h = rng, group, n * group
        self.q = rng.normal(size=(b, t, h, d))
        self.k, self.w = rng.normal(size=(2, b, s, n, d))
        self.w /= np.linalg.norm(self.w, axis=-1, keepdims=True)
        self.v = rng.normal(size=(b, s, n, 2))
        self.beta = rng.uniform(0, 2, size=(b, s, n))
        self.taus = {
            "layer": np.asarray(rng.uniform(0.3, 3)),
            "head": rng.uniform(0.3, 3, size=h),
        }
        self.per_dim = rng.normal(size=d)
        self.q_gain, self.k_gain = rng.choice([-1, 1], size=(2, d)) * rng.uniform(0.3, 2, (2, d))

    def x(self, layer, **others):
        """All inputs of a layer, by name."""
        given = {"tau": self.taus["head" if "per=head" in str(layer) else "layer"], **others}
        return {name: given.get(name, getattr(self, name, None)) for name in layer.inputs}

    def like_output(self):
        return self.rng.normal(size=(*self.q.shape[:3], self.v.shape[-1]))


@st.composite
def problems(draw, square=True, longest=7, narrowest=1):
    s = draw(st.integers(1, longest))
    return QuerySideProblem(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        t=s if square else draw(st.integers(1, s)),
        s=s,
        n=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        d=draw(st.integers(narrowest, 5)),
    )


# The definitions


def over_heads(tau):
    """τ as it divides queries (b, t, h, d)."""
    return tau if tau.ndim == 0 else tau[:, None]


def softplus(p):
    return np.logaddexp(0, p)


def normed(x, norm="rms", eps=1e-6, gain=None):
    x = x - np.mean(x, axis=-1, keepdims=True) if norm == "layer" else x
    x = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return x if gain is None else gain * x


def definition(layer, x):
    """The output, layer by layer from the outside; Φ is computed from the keys of the scores."""
    (q, k, v), normalize, log_of_mean = (x["q"], x["k"], x["v"]), None, False
    while hasattr(layer, "base"):
        match layer.name:
            case "temperature":
                q = q / over_heads(x["tau"])
            case "per_dim_scale":
                q = q * softplus(x["per_dim"]) / (np.log(2) if layer.normalize else 1)
            case "qk_norm":
                q = normed(q, layer.norm, layer.eps, x.get("q_gain"))
                k = normed(k, layer.norm, layer.eps, x.get("k_gain"))
            case "lucid":
                normalize = layer.normalize
            case "laser":
                log_of_mean = True
        layer = layer.base
    v = v if normalize is None else solved_values(k, v, normalize)
    scores = path_scores(q, k, x["w"], x["beta"]) if "w" in x else dot_scores(q, k)
    return read_causal(scores / np.sqrt(q.shape[-1]), v, layer.window, log_of_mean)


def size_of(layer, x):
    """The size of rounded intermediates: scores, and solved values, which only `keys` bounds."""
    grown = "normalize" in str(layer) and "per_dim" not in str(layer)
    y = solved_values(normed(x["k"], gain=x.get("k_gain")), x["v"], "rows") if grown else x["v"]
    return 100 * (1 + np.abs(y).max())


@pytest.mark.parametrize("layer", LAYERS)
@sampled
@given(p=problems(square=False))
def test_output_is_the_definition(layer, p):
    layer = pa.parse(layer)
    x = p.x(layer)
    assert_close(layer(**x), definition(layer, x), size=size_of(layer, x))


# Temperature


@sampled
@given(problems(square=False))
def test_a_temperature_is_a_divisor_of_the_scale(p):
    tau, scale = p.taus["layer"], p.q.shape[-1] ** -0.5
    divided = pa.Softmax(scale=scale / float(tau))(p.q, p.k, p.v)
    assert_close(pa.Temperature()(p.q, p.k, p.v, tau=tau), divided, size=10)
    other = pa.Temperature(pa.Softmax(scale=0.7))(p.q, p.k, p.v, tau=tau)
    assert_close(other, pa.Softmax(scale=0.7 / float(tau))(p.q, p.k, p.v), size=10)


@sampled
@given(problems(square=False))
def test_each_head_has_its_own_temperature(p):
    taus = p.taus["head"]
    out = pa.Temperature(per="head")(p.q, p.k, p.v, tau=taus)
    for head, tau in enumerate(taus):
        alone = pa.Temperature()(p.q, p.k, p.v, tau=np.asarray(tau))
        assert_close(out[:, :, head], alone[:, :, head], size=10)
    tau = p.taus["layer"]
    everywhere = pa.Temperature(per="head")(p.q, p.k, p.v, tau=np.full(taus.shape, tau))
    assert_close(everywhere, pa.Temperature()(p.q, p.k, p.v, tau=tau), size=10)


@pytest.mark.parametrize("per", ["layer", "head"])
@sampled
@given(p=problems(square=False))
def test_a_temperature_of_one_is_neutral(per, p):
    layer = pa.Temperature(per=per)
    out = layer(p.q, p.k, p.v, tau=np.ones_like(p.taus[per]))
    assert_close(out, pa.Softmax()(p.q, p.k, p.v))


@sampled
@given(problems(square=False))
def test_low_temperatures_select_the_best_key_and_high_ones_give_the_mean(p):
    layer = pa.Temperature(pa.Softmax(causal=False))
    hot = layer(p.q, p.k, p.v, tau=np.asarray(1e13))
    mean = np.repeat(p.v.mean(1, keepdims=True), p.group, axis=2)
    assert_close(hot, mean, size=10)
    cold = layer(p.q, p.k, p.v, tau=np.asarray(1e-13))
    best = np.argmax(dot_scores(p.q, p.k), axis=-1).transpose(0, 2, 1)[..., None]
    assert_close(cold, np.take_along_axis(np.repeat(p.v, p.group, axis=2), best, axis=1), size=10)


def test_a_bias_is_not_divided_by_the_temperature():
    p = QuerySideProblem(np.random.default_rng(0), t=5, n=2, group=2)
    bias = p.rng.normal(size=(2, 4, 5, 5))
    out = pa.Temperature(pa.Softmax(bias=True))(p.q, p.k, p.v, bias=bias, tau=np.asarray(4.0))
    expected = read_causal(dot_scores(p.q, p.k) / (4 * np.sqrt(3)) + bias, p.v)
    assert_close(out, expected)


@pytest.mark.parametrize("per", ["layer", "head"])
@pytest.mark.parametrize("base", ["softmax", "laser", "lucid", "path"])
@sampled
@given(p=problems(square=False))
def test_scaling_queries_and_temperatures_together_has_no_effect(base, per, p):
    """f(cq, cτ) = f(q, τ), and hence q·∂q + τ ∂τ = 0 for each head."""
    layer = pa.Temperature(pa.parse(base), per=per)
    x = p.x(layer, tau=p.taus[per])
    out, pullback = layer.vjp(**x)
    assert_close(layer(**(x | {"q": 3 * p.q, "tau": 3 * x["tau"]})), out, size=10)
    cotangent = p.like_output()
    gradients = pullback(cotangent)
    of_heads = np.sum(p.q * gradients["q"], axis=(0, 1, 3))
    of_heads = of_heads if per == "head" else of_heads.sum()
    assert gradients["tau"].shape == x["tau"].shape
    size = 100 * np.abs(cotangent).sum()
    assert_close(x["tau"] * gradients["tau"], -of_heads, size=size)


# A scale for each dimension


@sampled
@given(problems(square=False))
def test_a_zero_is_neutral_or_multiplies_scores_by_log_2(p):
    zeros = np.zeros_like(p.per_dim)
    plain = pa.Softmax()(p.q, p.k, p.v)
    assert_close(pa.PerDimScale()(p.q, p.k, p.v, per_dim=zeros), plain)
    literal = pa.PerDimScale(normalize=False)(p.q, p.k, p.v, per_dim=zeros)
    scale = np.log(2) * p.q.shape[-1] ** -0.5
    assert_close(literal, pa.Softmax(scale=scale)(p.q, p.k, p.v))


@sampled
@given(problems(square=False), st.floats(-5, 5))
def test_equal_scales_are_a_temperature(p, value):
    out = pa.PerDimScale()(p.q, p.k, p.v, per_dim=np.full_like(p.per_dim, value))
    tau = np.asarray(np.log(2) / softplus(value))
    assert_close(out, pa.Temperature()(p.q, p.k, p.v, tau=tau), size=100)


@sampled
@given(problems(square=False, narrowest=2))
def test_a_dimension_of_very_negative_scale_has_no_effect(p):
    per_dim = p.per_dim.copy()
    per_dim[0] = -1e3
    out = pa.PerDimScale()(p.q, p.k, p.v, per_dim=per_dim)
    alone = pa.PerDimScale(pa.Softmax(scale=p.q.shape[-1] ** -0.5))
    expected = alone(p.q[..., 1:], p.k[..., 1:], p.v, per_dim=per_dim[1:])
    assert_close(out, expected, size=10)


@pytest.mark.parametrize("normalize", [True, False])
@sampled
@given(p=problems(square=False))
def test_gradient_of_the_scales_contains_their_logistic(normalize, p):
    layer = pa.PerDimScale(normalize=normalize)
    scale = softplus(p.per_dim) / (np.log(2) if normalize else 1)
    cotangent = p.like_output()
    _, pullback = layer.vjp(p.q, p.k, p.v, per_dim=p.per_dim)
    gradients = pullback(cotangent)
    inner = pa.Softmax().vjp(p.q * scale, p.k, p.v)[1](cotangent)
    size = 100 * np.abs(cotangent).sum()
    logistic = 1 / (1 + np.exp(-p.per_dim)) / (np.log(2) if normalize else 1)
    expected = np.sum(p.q * inner["q"], axis=(0, 1, 2)) * logistic
    assert_close(gradients["per_dim"], expected, size=size)
    assert_close(gradients["q"], scale * inner["q"], size=size)
    assert_close(gradients["k"], inner["k"], size=size)
    assert_close(gradients["v"], inner["v"], size=size)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("values", [(1e3, 1e3, 1e3), (-1e3, -1e3, -1e3), (1e3, 0.0, -1e3)])
def test_enormous_scales_stay_finite_and_exact(values, normalize):
    p = QuerySideProblem(np.random.default_rng(0), t=5, n=2, group=2)
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
    p = QuerySideProblem(np.random.default_rng(0), t=5)
    q, k, v = (torch.tensor(x) for x in (p.q, p.k, p.v))
    per_dim = torch.full((3,), value, dtype=torch.float64, requires_grad=True)
    pa.PerDimScale()(q, k, v, per_dim=per_dim).sum().backward()
    _, pullback = pa.PerDimScale().vjp(p.q, p.k, p.v, per_dim=np.full(3, value))
    expected = pullback(np.ones((*p.q.shape[:3], 2)))["per_dim"]
    assert np.all(np.isfinite(expected))
    assert_close(per_dim.grad.numpy(), expected, size=1)


# Norms of queries and keys


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("gain", [True, False])
@sampled
@given(p=problems(square=False, narrowest=2))
def test_the_length_of_a_query_and_of_a_key_does_not_matter(gain, norm, p):
    layer = pa.QKNorm(norm=norm, eps=0, gain=gain)
    x = p.x(layer)
    out, pullback = layer.vjp(**x)
    factors = [np.exp(p.rng.uniform(-7, 7, size=(*array.shape[:3], 1))) for array in (p.q, p.k)]
    longer = x | {"q": factors[0] * p.q, "k": factors[1] * p.k}
    assert_close(layer(**longer), out, size=100)
    cotangent = p.like_output()
    gradients = pullback(cotangent)
    for name in "qk":
        along = np.sum(x[name] * gradients[name], axis=-1)
        assert_close(along, 0.0, size=100 * np.abs(cotangent).sum())


@pytest.mark.parametrize("eps", [0, 1e-6, 0.5])
@sampled
@given(p=problems(square=False, narrowest=2))
def test_the_mean_of_a_query_and_of_a_key_does_not_matter_to_the_layer_norm(eps, p):
    layer = pa.QKNorm(norm="layer", eps=eps, gain=True)
    x = p.x(layer)
    # Two dimensions may be almost equal, which amplifies rounding errors.
    enlarged = max(1 / np.sqrt(array.var(-1) + eps).min() for array in (p.q, p.k))
    out, pullback = layer.vjp(**x)
    shifts = [3 * p.rng.normal(size=(*array.shape[:3], 1)) for array in (p.q, p.k)]
    shifted = x | {"q": p.q + shifts[0], "k": p.k + shifts[1]}
    assert_close(layer(**shifted), out, size=1000 * enlarged)
    cotangent = p.like_output()
    gradients = pullback(cotangent)
    for name in "qk":
        size = 100 * enlarged * np.abs(cotangent).sum()
        assert_close(gradients[name].sum(-1), 0.0, size=size)


def test_the_mean_matters_to_the_rms_norm():
    p, layer = QuerySideProblem(np.random.default_rng(0), t=5), pa.QKNorm()
    assert np.abs(layer(p.q + 3, p.k, p.v) - layer(p.q, p.k, p.v)).max() > 0.01
    assert np.abs(pa.QKNorm(norm="layer")(p.q, p.k, p.v) - layer(p.q, p.k, p.v)).max() > 0.01


@sampled
@given(problems(square=False))
def test_a_common_rotation_does_not_matter_to_the_rms_norm(p):
    rotation, _ = np.linalg.qr(p.rng.normal(size=(p.q.shape[-1],) * 2))
    layer = pa.QKNorm()
    assert_close(layer(p.q @ rotation, p.k @ rotation, p.v), layer(p.q, p.k, p.v), size=10)


@pytest.mark.parametrize("norm", NORMS)
@sampled
@given(p=problems(square=False, narrowest=2))
def test_qk_norm_is_the_base_on_normalised_queries_and_keys(norm, p):
    for eps in (0.0, 1e-6, 0.5):
        q, k = (normed(x, norm, eps) for x in (p.q, p.k))
        out = pa.QKNorm(norm=norm, eps=eps)(p.q, p.k, p.v)
        assert_close(out, pa.Softmax()(q, k, p.v), size=100)
        gained = pa.QKNorm(norm=norm, eps=eps, gain=True)
        expected = pa.Softmax()(p.q_gain * q, p.k_gain * k, p.v)
        assert_close(gained(**p.x(gained)), expected, size=100)


@pytest.mark.parametrize("norm", NORMS)
@sampled
@given(p=problems(square=False))
def test_a_gain_of_one_is_neutral_and_only_the_product_of_gains_matters(norm, p):
    layer = pa.QKNorm(norm=norm, gain=True)
    ones = np.ones_like(p.q_gain)
    out = layer(p.q, p.k, p.v, q_gain=ones, k_gain=ones)
    assert_close(out, pa.QKNorm(norm=norm)(p.q, p.k, p.v), size=10)
    x = p.x(layer)
    out, pullback = layer.vjp(**x)
    moved = x | {"q_gain": p.q_gain * p.k_gain, "k_gain": ones}
    assert_close(layer(**moved), out, size=10)
    gradients = pullback(p.like_output())
    sums = p.q_gain * gradients["q_gain"], p.k_gain * gradients["k_gain"]
    assert_close(sums[0], sums[1], size=100 * p.q.size)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("eps", [0, 1e-6])
@pytest.mark.parametrize("zero", ["q", "k", "qk"])
@pytest.mark.parametrize("text", ["qk_norm", "lucid(qk_norm)", "qk_norm(path)"])
def test_zero_queries_and_keys_have_scores_of_zero_and_finite_gradients(text, zero, eps, norm):
    p = QuerySideProblem(np.random.default_rng(0), t=6, n=2, group=2)
    layer = pa.parse(text.replace("qk_norm", f"qk_norm[norm={norm},eps={eps},gain=true]"))
    x = p.x(layer)
    for name in zero:
        x[name] = x[name].copy()
        x[name][:, [0, 3, 4]] = 0
        if norm == "layer":
            x[name][:, 4] = 7.0  # Only the mean is left.
    out, pullback = layer.vjp(**x)
    filled = {name: np.where(array == 7.0, 0, array) for name, array in x.items()}
    with_eps = pa.parse(str(layer).replace("eps=0", "eps=1e-300"))
    assert_close(out, definition(with_eps, filled), size=10)
    gradients = pullback(p.like_output())
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())


@pytest.mark.parametrize("height", [1e-3, 1.0, 1e3, 1e100])
def test_scores_are_bounded_however_long_queries_and_keys(height):
    """|s⟨norm(q), norm(k)⟩| ≤ √d, so that no weight is below e^(−2√d)/n."""
    p = QuerySideProblem(np.random.default_rng(0), t=6, d=4)
    eye = np.broadcast_to(np.eye(6)[:, None], (2, 6, 1, 6)).copy()
    for norm in NORMS:
        weights = pa.QKNorm(pa.Softmax(causal=False), norm=norm)(height * p.q, height * p.k, eye)
        assert weights.min() >= np.exp(-2 * np.sqrt(4)) / 6
    if height >= 1e3:
        assert pa.Softmax(causal=False)(height * p.q, height * p.k, eye).min() == 0


# Around and inside LUCID and LASER


@pytest.mark.parametrize("normalize", ["keys", "rows", "none"])
@pytest.mark.parametrize(
    "query_side", ["temperature", "temperature[per=head]", "per_dim_scale", "qk_norm[gain=true]"]
)
@sampled
@given(p=problems(square=False))
def test_inside_or_outside_lucid_gives_the_same_output(query_side, normalize, p):
    inside = pa.parse(f"lucid[normalize={normalize}]({query_side})")
    outside = pa.parse(f"{query_side}(lucid[normalize={normalize}])")
    x = p.x(inside)
    out, pullback = inside.vjp(**x)
    other, other_pullback = outside.vjp(**x)
    k = normed(p.k, gain=p.k_gain) if "norm[" in query_side else p.k
    size = 100 * (1 + np.abs(solved_values(k, p.v, normalize)).max())
    assert_close(other, out, size=size)
    cotangent = p.like_output()
    gradients, others = pullback(cotangent), other_pullback(cotangent)
    for name, gradient in gradients.items():
        assert_close(others[name], gradient, size=size * max(1, np.abs(gradient).max()))


@pytest.mark.parametrize("query_side", ["temperature", "per_dim_scale"])
def test_changes_to_queries_alone_do_not_reach_the_solve(query_side):
    p = QuerySideProblem(np.random.default_rng(0), t=6, d=2)
    scaled = {"temperature": p.q / p.taus["layer"]}
    q = scaled.get(query_side, p.q * softplus(p.per_dim) / np.log(2))
    for text in (f"lucid({query_side})", f"{query_side}(lucid)"):
        layer = pa.parse(text)
        x = p.x(layer)
        assert_close(layer(**x), pa.Softmax()(q, p.k, solved_values(p.k, p.v)), size=10)
    if query_side == "temperature":  # As it would be if τ divided the scale of Φ as well.
        layer = pa.Lucid(pa.Temperature(), scale=2**-0.5 / float(p.taus["layer"]))
        assert np.abs(layer(**x) - pa.parse("lucid(temperature)")(**x)).max() > 1e-3


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("text", ["lucid({})", "{}(lucid)"])
@sampled
@given(p=problems(square=False, narrowest=2))
def test_lucid_solves_with_the_normalised_keys_and_their_gain(text, norm, p):
    layer = pa.parse(text.format(f"qk_norm[norm={norm},gain=true]"))
    q, k = normed(p.q, norm, gain=p.q_gain), normed(p.k, norm, gain=p.k_gain)
    expected = pa.Softmax()(q, k, solved_values(k, p.v))
    assert_close(layer(**p.x(layer)), expected, size=100)


@pytest.mark.parametrize("text", ["lucid(qk_norm[gain=true])", "qk_norm[gain=true](lucid)"])
def test_lucid_does_not_solve_with_the_keys_before_the_gain(text):
    p = QuerySideProblem(np.random.default_rng(0), t=6, d=2)
    layer = pa.parse(text)
    x = p.x(layer, k_gain=np.array([5.0, 0.1]))
    q, k = normed(p.q, gain=p.q_gain), normed(p.k, gain=x["k_gain"])
    before_the_gain = pa.Softmax()(q, k, solved_values(p.k, p.v))
    assert np.abs(layer(**x) - before_the_gain).max() > 0.01


@pytest.mark.parametrize("text", ["lucid({})", "{}(lucid)"])
@pytest.mark.parametrize("height", [1e-3, 1.0, 1e3])
@sampled
@given(p=problems(longest=16))
def test_lucid_over_normalised_keys_is_bounded_whatever_the_gain(text, height, p):
    """|P_ij| ≤ 1 for the inverse P, and so for A P, A having rows that sum to one."""
    layer = pa.parse(text.format("qk_norm[gain=true]"))
    b, s, n, _ = p.k.shape
    k = p.k[:, p.rng.integers(s, size=s)]  # Duplicates.
    eye = np.broadcast_to(np.eye(s)[:, None], (b, s, n, s)).copy()
    matrix = layer(**p.x(layer, k=k, v=eye, k_gain=height * p.k_gain))
    assert np.abs(matrix).max() <= 1 + 1e-10


@sampled
@given(problems(square=False))
def test_without_gain_lucid_over_qk_norm_is_lucid_with_normalised_queries_and_keys(p):
    """Exactly at ε = 0; otherwise the keys of Φ are normalised twice, a difference of O(ε)."""
    shortest = min(np.mean(x * x, axis=-1).min() for x in (p.q, p.k))
    for eps, tolerance in [(0.0, 1e-10), (1e-6, 1e-3 * (1e-6 / min(1, shortest)) ** 0.5)]:
        over_unit_rows = pa.Lucid(normalize="queries_and_keys", eps=eps)
        out = over_unit_rows(p.q, p.k, p.v)
        for text in ("lucid[eps={0}](qk_norm[eps={0}])", "qk_norm[eps={0}](lucid[eps={0}])"):
            other = pa.parse(text.format(eps))(p.q, p.k, p.v)
            assert np.abs(other - out).max() <= tolerance * 100


@sampled
@given(problems(square=False))
def test_laser_uses_the_temperature(p):
    tau = p.taus["layer"]
    scores = dot_scores(p.q, p.k) / (np.sqrt(p.q.shape[-1]) * tau)
    expected = read_causal(scores, p.v, log_of_mean=True)
    for text in ("laser(temperature)", "temperature(laser)"):
        assert_close(pa.parse(text)(p.q, p.k, p.v, tau=tau), expected, size=100)


@pytest.mark.parametrize("query_side", ["temperature", "per_dim_scale", "qk_norm[gain=true]"])
@sampled
@given(p=problems(square=False))
def test_inside_or_outside_laser_gives_the_same_output(query_side, p):
    inside, outside = pa.parse(f"laser({query_side})"), pa.parse(f"{query_side}(laser)")
    x = p.x(inside)
    assert_close(outside(**x), inside(**x), size=100)


# Around PaTH


@pytest.mark.parametrize("query_side", ["temperature", "per_dim_scale", "qk_norm[gain=true]"])
@sampled
@given(p=problems(square=False))
def test_over_path_without_reflections_the_output_is_that_over_softmax(query_side, p):
    path, plain = pa.parse(f"{query_side}(path)"), pa.parse(query_side)
    out = path(**p.x(path, beta=0 * p.beta))
    assert_close(out, plain(**p.x(plain)), size=100)


@sampled
@given(problems(square=False))
def test_over_path_queries_and_keys_are_normalised_before_they_are_reflected(p):
    layer = pa.parse("qk_norm(path)")
    q, k = normed(p.q), normed(p.k)
    scores = path_scores(q, k, p.w, p.beta) / np.sqrt(p.q.shape[-1])
    assert_close(layer(**p.x(layer)), read_causal(scores, p.v), size=100)


@pytest.mark.parametrize("query_side", ["temperature", "per_dim_scale", "qk_norm[gain=true]"])
@sampled
@given(p=problems(square=False))
def test_inside_or_outside_lucid_over_path_gives_the_same_output(query_side, p):
    inside = pa.parse(f"lucid({query_side}(path))")
    outside = pa.parse(f"{query_side}(lucid(path))")
    x = p.x(inside)
    out = inside(**x)
    assert_close(outside(**x), out, size=100)
    if query_side == "temperature":
        scaled = {name: x[name] for name in x if name != "tau"} | {"q": p.q / x["tau"]}
        assert_close(pa.parse("lucid(path)")(**scaled), out, size=100)


# Gradients


# Caches


def test_temperatures_and_scales_are_not_in_the_cache_and_may_change():
    p = QuerySideProblem(np.random.default_rng(0), t=5)
    layer = pa.Temperature()
    x = p.x(layer)
    cache = layer.init_cache(**x, capacity=5)
    assert sorted(cache.store) == ["k", "v"]
    _, cache = layer.extend(cache, **part(x, slice(0, 4)))
    colder = x | {"tau": np.asarray(0.1)}
    out, _ = layer.extend(cache, **part(colder, slice(4, 5)))
    assert_close(out, layer(**colder)[:, 4:], size=10)


# Construction


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("temperature(qk_norm)", r"normalises its queries, .*; write qk_norm\(temperature\)$"),
        ("temperature(laser(qk_norm))", r"normalises .*; write laser\(qk_norm\(temperature\)\)$"),
        (
            "temperature(lucid[normalize=queries_and_keys])",
            r"normalises .*; write lucid\[normalize=queries_and_keys\]\(temperature\)$",
        ),
        ("per_dim_scale(qk_norm)", r"normalises its queries, .*; write qk_norm\(per_dim_scale\)$"),
        (
            "per_dim_scale(lucid(qk_norm))",
            r"normalises .*; write lucid\(qk_norm\(per_dim_scale\)\)$",
        ),
        ("qk_norm(qk_norm)", "the base normalises its queries already"),
        ("qk_norm[norm=layer](lucid(qk_norm))", "the base normalises its queries already"),
        ("qk_norm(lucid[normalize=queries_and_keys])", "the base normalises its queries already"),
        ("lucid[normalize=queries_and_keys](qk_norm)", "the base would change it again"),
        ("temperature(temperature)", "tau is an input of temperature already"),
        (
            "temperature(lucid(temperature))",
            "tau is an input of .* already, and would be",
        ),
        ("per_dim_scale(per_dim_scale)", "per_dim is an input of per_dim_scale already"),
    ],
)
def test_compositions_that_make_no_sense_are_refused_with_the_reason(text, reason):
    with pytest.raises(TypeError, match=rf"^{re.escape(text)} makes no sense: .*{reason}"):
        pa.parse(text)


@pytest.mark.parametrize(
    "text",
    ["qk_norm(temperature)", "qk_norm(per_dim_scale)", "per_dim_scale(temperature)"],
)
def test_compositions_that_make_sense_are_accepted(text):
    p, layer = QuerySideProblem(np.random.default_rng(0), t=5), pa.parse(text)
    x = p.x(layer)
    assert_close(layer(**x), definition(layer, x), size=10)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (pa.Temperature, {"per": "token"}),
        (pa.QKNorm, {"norm": "batch"}),
        (pa.QKNorm, {"eps": -1e-6}),
        (pa.QKNorm, {"gain": 1}),
        (pa.PerDimScale, {"normalize": None}),
    ],
)
def test_options_are_checked(cls, options):
    with pytest.raises((TypeError, ValueError), match=f"{cls.name}: option {next(iter(options))}"):
        cls(**options)


def test_the_inputs_follow_from_the_options():
    for text, over_unit_rows in [
        ("temperature", "tau"),
        ("per_dim_scale", "per_dim"),
        ("qk_norm", ""),
        ("qk_norm[gain=true]", "q_gain k_gain"),
        ("lucid(qk_norm[norm=layer,gain=true])", "q_gain k_gain"),
        ("temperature(path)", "w beta tau"),
    ]:
        assert set(pa.parse(text).inputs) == {"q", "k", "v", *over_unit_rows.split()}


# Shorthands


def in_torch(x):
    torch = pytest.importorskip("torch")
    return {name: torch.asarray(array) for name, array in x.items()}


SHORTHANDS = [
    (pa.temperature, {}, "temperature"),
    (pa.temperature, {"per": "head"}, "temperature[per=head]"),
    (pa.temperature, {"scale": 0.3, "causal": False}, None),
    (pa.per_dim_scale, {}, "per_dim_scale"),
    (pa.per_dim_scale, {"normalize": False}, "per_dim_scale[normalize=false]"),
    (pa.qk_norm, {}, "qk_norm"),
    (pa.qk_norm, {"norm": "layer", "eps": 0.1}, "qk_norm[norm=layer,eps=0.1]"),
    (pa.qk_norm, {"window": 2}, "qk_norm(softmax[window=2])"),
    (pa.row_normalized, {}, "row_normalized"),
    (pa.row_normalized, {"eps": 0.5, "detach": False}, "row_normalized[eps=0.5,detach=false]"),
    (
        pa.row_normalized,
        {"axis": "channel", "causal": False},
        "row_normalized[axis=channel](softmax[causal=false])",
    ),
    (pa.path, {}, "path"),
    (pa.path, {"scale": 0.4, "window": 3}, "path[scale=0.4,window=3]"),
    (pa.path, {"forget": "unscaled"}, "path[forget=unscaled]"),
    (pa.differential, {"paired": ("q",)}, "differential[paired=q]"),
    (pa.differential, {"window": 2}, "differential(softmax[window=2])"),
]


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(("shorthand", "options", "text"), SHORTHANDS)
def test_a_shorthand_equals_a_call_of_its_class(shorthand, options, text, library):
    p = QuerySideProblem(np.random.default_rng(0), t=5, n=2, group=2)
    layer = pa.parse(text or "temperature(softmax[causal=false,scale=0.3])")
    g = -p.rng.uniform(size=(2, 5, 4))
    x = p.x(layer, q2=p.q[::-1], k2=p.k[::-1], lam=np.asarray(0.7), g=g)
    x = in_torch({name: array.copy() for name, array in x.items()}) if library == "torch" else x
    arrays, named = [x.pop(name) for name in "qkv"], x
    expected, result = layer(*arrays, **named), shorthand(*arrays, **named, **options)
    np.testing.assert_array_equal(np.asarray(result), np.asarray(expected))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_shorthand_infers_per_from_the_number_of_axes(library):
    p = QuerySideProblem(np.random.default_rng(0), t=5, n=2, group=2)
    x = {"q": p.q, "k": p.k, "v": p.v, "q2": p.q[::-1].copy(), "k2": p.k[::-1].copy()}
    x |= {f"tau_{per}": tau for per, tau in p.taus.items()}
    lams = {"layer": (), "head": (4,), "token": (2, 5, 4)}
    x |= {f"lam_{per}": np.asarray(p.rng.normal(size=shape)) for per, shape in lams.items()}
    x = in_torch(x) if library == "torch" else x
    arrays, second = [x[name] for name in "qkv"], {name: x[name] for name in ("q2", "k2")}
    for per in ("layer", "head"):
        tau = x[f"tau_{per}"]
        expected = pa.Temperature(per=per)(*arrays, tau=tau)
        result = pa.temperature(*arrays, tau=tau)
        np.testing.assert_array_equal(np.asarray(result), np.asarray(expected))
    for per in ("layer", "head", "token"):
        lam = x[f"lam_{per}"]
        expected = pa.Differential(per=per)(*arrays, **second, lam=lam)
        result = pa.differential(*arrays, **second, lam=lam)
        np.testing.assert_array_equal(np.asarray(result), np.asarray(expected))


def test_a_single_head_has_its_own_temperature():
    p = QuerySideProblem(np.random.default_rng(0), t=5)
    tau = np.array([0.5])
    expected = pa.Temperature()(p.q, p.k, p.v, tau=tau[0, ...])
    assert_close(pa.temperature(p.q, p.k, p.v, tau=tau), expected)


def test_gains_switch_the_gain_on():
    p = QuerySideProblem(np.random.default_rng(0), t=5, n=2, group=2)
    for norm in NORMS:
        layer = pa.QKNorm(norm=norm, gain=True)
        result = pa.qk_norm(p.q, p.k, p.v, q_gain=p.q_gain, k_gain=p.k_gain, norm=norm)
        np.testing.assert_array_equal(result, layer(**p.x(layer)))


def test_a_shorthand_names_an_unknown_keyword():
    p = QuerySideProblem(np.random.default_rng(0), t=5)
    with pytest.raises(TypeError, match=r"temperature: unknown keyword 'tua'.*'tau'"):
        pa.temperature(p.q, p.k, p.v, tua=p.taus["layer"])
    with pytest.raises(pa.ShapeError, match="tau"):
        pa.temperature(p.q, p.k, p.v, tau=p.taus["layer"], per="head")
    with pytest.raises(TypeError, match="per_dim"):
        pa.per_dim_scale(p.q, p.k, p.v)
