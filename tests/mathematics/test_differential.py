"""Differential attention against identities that hold for any implementation.

The definition is o = f(q, k, v) − λ f(q2, k2, v), f being the base and λ one number, one for each
head, or one for each token and head. Everything is float64, and an identity has to hold to 1e-10
of the largest number involved, and a gradient to 1e-7 of central differences.
"""

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import precondattn as pa
from tests.mathematics.identities import (
    assert_close,
)
from tests.mathematics.loops import dot_scores, path_scores, read, solved_values, visible_keys

sampled = settings(
    max_examples=15, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
PER = ["layer", "head", "token"]
LAYERS = [
    "differential",
    "differential[per=head]",
    "differential[per=token]",
    "differential[paired=q]",
    "differential[paired=k]",
    "differential[per=head](softmax[window=3])",
    "differential[per=token](laser)",
    "differential[per=head](lucid)",
    "differential[paired=q](lucid)",
    "differential(lucid(laser))",
    "differential(path)",
    "differential[per=token,paired=q/k/w/beta](path)",
]


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


class DifferentialProblem:
    """Random inputs of two maps of scores, and λ in its three shapes."""

    def __init__(self, rng, *, t, s=None, n=1, group=1, d=3, b=2, height=1.0):
        s = t if s is None else s
        self.rng, self.group, h = rng, group, n * group
        self.q, self.q2 = 2 * rng.normal(size=(2, b, t, h, d))
        self.k, self.k2 = rng.normal(size=(2, b, s, n, d))
        self.w, self.w2 = unit(rng.normal(size=(2, b, s, n, d)))
        self.beta, self.beta2 = rng.uniform(0, 2, size=(2, b, s, n))
        self.v = height * rng.normal(size=(b, s, n, 2))
        shapes = {"layer": (), "head": (h,), "token": (b, t, h)}
        self.lams = {
            per: np.asarray(rng.choice([-1, 1], size=shape) * rng.uniform(0.2, 2, size=shape))
            for per, shape in shapes.items()
        }
        self.size = 10 * (1 + height)  # The size of the two outputs and of the scores.

    def x(self, layer, **others):
        """All inputs of a layer, by name."""
        given = {"lam": self.lams[layer.per], **others}
        return {name: given.get(name, getattr(self, name, None)) for name in layer.inputs}

    def like_output(self):
        return self.rng.normal(size=(*self.q.shape[:3], self.v.shape[-1]))


@st.composite
def problems(draw, square=True, longest=7, heights=(1.0,)):
    s = draw(st.integers(1, longest))
    return DifferentialProblem(
        np.random.default_rng(draw(st.integers(0, 2**32 - 1))),
        t=s if square else draw(st.integers(1, s)),
        s=s,
        n=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        d=draw(st.integers(1, 4)),
        height=draw(st.sampled_from(heights)),
    )


def over_heads(lam):
    """λ as it multiplies an output (b, t, h, e)."""
    return {0: lam, 1: lam[..., None], 3: lam[..., None]}[lam.ndim]


def one_map(base, x, visible):
    """The base's output, for the bases of `LAYERS`."""
    v = solved_values(x["k"], x["v"]) if base.startswith("lucid") else x["v"]
    q, k = x["q"], x["k"]
    scores = path_scores(q, k, x["w"], x["beta"]) if base.startswith("path") else dot_scores(q, k)
    return read(scores / np.sqrt(q.shape[-1]), visible, v, log_of_mean="laser" in base)


def two_maps(layer, x, **masks):
    """o₁ and o₂ by the definition."""
    (b, t), s = x["q"].shape[:2], x["k"].shape[1]
    visible = visible_keys(b, t, s, window=3 if "window=3" in str(layer) else None, **masks)
    second = x | {name: x[f"{name}2"] for name in layer.paired}
    return [one_map(str(layer.base), each, visible) for each in (x, second)]


def definition(layer, x, **masks):
    first, second = two_maps(layer, x, **masks)
    return first - over_heads(x["lam"]) * second


# The definition


@pytest.mark.parametrize("layer", LAYERS)
@sampled
@given(p=problems(square=False))
def test_output_is_the_definition(layer, p):
    layer = pa.parse(layer)
    x = p.x(layer)
    assert_close(layer(**x), definition(layer, x), size=p.size)


@pytest.mark.parametrize("per", PER)
@sampled
@given(p=problems(), data=st.data())
def test_masks_reach_both_maps(per, p, data):
    layer = pa.Differential(per=per)
    b, s = p.k.shape[:2]
    mask = p.rng.random((b, s)) < 0.6
    lengths = np.array([data.draw(st.integers(0, s)) for _ in range(b)])
    segments = np.sort(p.rng.integers(3, size=(b, s)), axis=1)
    x = p.x(layer)
    for masks in [
        {"key_mask": mask},
        {"lengths": lengths},
        {"segment_ids": segments},
        {"key_mask": mask, "lengths": lengths, "segment_ids": segments},
    ]:
        assert_close(layer(**x, **masks), definition(layer, x, **masks), size=p.size)


@pytest.mark.parametrize("layer", LAYERS)
@sampled
@given(p=problems(), data=st.data())
def test_masked_inputs_may_be_nan_and_get_no_gradient(layer, p, data):
    layer = pa.parse(layer)
    b, s = p.k.shape[:2]
    lengths = np.array([data.draw(st.integers(0, s)) for _ in range(b)])
    padding = np.arange(s) >= lengths[:, None]
    x = p.x(layer)
    along_time = [name for name in x if x[name].ndim >= 3]
    masked = {
        name: np.where(padding.reshape(b, s, *[1] * (x[name].ndim - 2)), np.nan, x[name])
        for name in along_time
    }
    out, pullback = layer.vjp(**(x | masked), lengths=lengths)
    assert np.all(out[padding] == 0)
    for i, length in enumerate(lengths):
        one = {name: x[name][i : i + 1, :length] if name in along_time else x[name] for name in x}
        if length:
            assert_close(out[i : i + 1, :length], layer(**one), size=p.size)
    for name, gradient in pullback(p.like_output()).items():
        assert np.all(np.isfinite(gradient))
        assert name not in along_time or np.all(gradient[padding] == 0)


# Values of λ


@pytest.mark.parametrize("per", PER)
@sampled
@given(p=problems(square=False))
def test_without_lambda_it_is_the_first_map(per, p):
    layer = pa.Differential(per=per)
    zero = np.zeros_like(p.lams[per])
    out, pullback = layer.vjp(**p.x(layer, lam=zero))
    expected, softmax_pullback = pa.Softmax().vjp(p.q, p.k, p.v)
    assert_close(out, expected)
    cotangent = p.like_output()
    gradients = pullback(cotangent)
    for name, gradient in softmax_pullback(cotangent).items():
        assert_close(gradients[name], gradient, size=p.size)
    assert np.all(gradients["q2"] == 0)
    assert np.all(gradients["k2"] == 0)


@pytest.mark.parametrize("layer", LAYERS)
@sampled
@given(p=problems(square=False))
def test_equal_maps_give_the_base_times_one_minus_lambda(layer, p):
    layer = pa.parse(layer)
    x = p.x(layer)
    x |= {f"{name}2": x[name] for name in layer.paired}
    base = layer.base(**{name: x[name] for name in layer.base.inputs})
    assert_close(layer(**x), (1 - over_heads(x["lam"])) * base, size=p.size)


@pytest.mark.parametrize("layer", LAYERS)
@sampled
@given(p=problems(square=False))
def test_equal_maps_with_lambda_of_one_cancel_exactly(layer, p):
    layer = pa.parse(layer)
    x = p.x(layer)
    x |= {f"{name}2": x[name] for name in layer.paired} | {"lam": np.ones_like(x["lam"])}
    assert np.all(layer(**x) == 0)


@pytest.mark.parametrize("per", PER)
@sampled
@given(p=problems(square=False))
def test_rows_sum_to_one_minus_lambda(per, p):
    layer = pa.Differential(per=per)
    rest = 1 - over_heads(p.lams[per])
    assert_close(layer(**p.x(layer, v=np.ones_like(p.v))), rest, size=p.size)
    b, s, n, _ = p.k.shape
    eye = np.broadcast_to(np.eye(s)[:, None], (b, s, n, s)).copy()
    rows = layer(**p.x(layer, v=eye))
    assert_close(rows.sum(-1, keepdims=True), rest, size=p.size)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("base", ["softmax", "laser", "lucid"])
@sampled
@given(p=problems(square=False))
def test_swapping_the_maps_inverts_lambda(base, per, p):
    """D(1, 2; λ) = −λ D(2, 1; 1/λ)."""
    layer, lam = pa.Differential(pa.parse(base), per=per), p.lams[per]
    swapped = p.x(layer, q=p.q2, q2=p.q, k=p.k2, k2=p.k, lam=1 / lam)
    assert_close(layer(**p.x(layer)), -over_heads(lam) * layer(**swapped), size=p.size)


@sampled
@given(problems(square=False))
def test_the_shapes_of_lambda_agree_for_equal_numbers(p):
    layers = {per: pa.Differential(per=per) for per in PER}
    b, t, h, _ = p.q.shape
    one, each = p.lams["layer"], p.lams["head"]
    everywhere = {"layer": one, "head": np.full((h,), one), "token": np.full((b, t, h), one)}
    outs = [layers[per](**p.x(layers[per], lam=lam)) for per, lam in everywhere.items()]
    assert_close(outs[1], outs[0], size=p.size)
    assert_close(outs[2], outs[0], size=p.size)
    by_token = np.broadcast_to(each, (b, t, h)).copy()
    out, pullback = layers["head"].vjp(**p.x(layers["head"]))
    token_out, token_pullback = layers["token"].vjp(**p.x(layers["token"], lam=by_token))
    assert_close(token_out, out, size=p.size)
    cotangent = p.like_output()
    summed = token_pullback(cotangent)["lam"].sum((0, 1))
    assert_close(pullback(cotangent)["lam"], summed, size=100 * p.size)
    _, layer_pullback = layers["layer"].vjp(**p.x(layers["layer"]))
    _, full_pullback = layers["head"].vjp(**p.x(layers["head"], lam=everywhere["head"]))
    summed = full_pullback(cotangent)["lam"].sum()
    assert_close(layer_pullback(cotangent)["lam"], summed, size=100 * p.size)


def test_heads_and_tokens_have_their_own_lambda():
    p = DifferentialProblem(np.random.default_rng(0), t=4, n=2, group=2)
    for per, place in [("head", (2,)), ("token", (1, 3, 2))]:
        layer = pa.Differential(per=per)
        changed = p.lams[per].copy()
        changed[place] += 1
        moved = layer(**p.x(layer, lam=changed)) != layer(**p.x(layer))
        expected = np.zeros((2, 4, 4), dtype=bool)
        expected[(slice(None), slice(None), *place) if per == "head" else place] = True
        np.testing.assert_array_equal(moved.all(-1), expected)
        np.testing.assert_array_equal(moved.any(-1), expected)


# What the maps share


def test_the_two_maps_share_what_is_not_paired():
    for text, own, second in [
        ("differential", "q k v", "q2 k2"),
        ("differential[paired=q]", "q k v", "q2"),
        ("differential[paired=k]", "q k v", "k2"),
        ("differential(laser)", "q k v", "q2 k2"),
        ("differential(path)", "q k v w beta", "q2 k2"),
        ("differential[paired=q/k/w/beta](path)", "q k v w beta", "q2 k2 w2 beta2"),
        ("differential(temperature)", "q k v tau", "q2 k2"),
        ("differential[paired=q/k/tau](temperature)", "q k v tau", "q2 k2 tau2"),
    ]:
        assert set(pa.parse(text).inputs) == {*own.split(), *second.split(), "lam"}


def test_directions_of_the_second_map_matter_only_where_they_are_paired():
    p = DifferentialProblem(np.random.default_rng(0), t=5, n=2, group=2)
    shared = pa.parse("differential(path)")
    paired = pa.parse("differential[paired=q/k/w/beta](path)")
    both = p.x(paired, w2=p.w, beta2=p.beta)
    assert_close(paired(**both), shared(**p.x(shared)), size=p.size)
    apart = paired(**p.x(paired)) - paired(**both)
    assert np.abs(apart).max() > 0.1
    without = paired(**p.x(paired, beta=0 * p.beta, beta2=0 * p.beta))
    plain = pa.Differential()
    assert_close(without, plain(**p.x(plain)), size=p.size)


@sampled
@given(problems(square=False))
def test_a_temperature_of_each_map_divides_its_scores(p):
    layer = pa.parse("differential[paired=q/k/tau](temperature)")
    tau, tau2 = np.asarray(0.5), np.asarray(3.0)
    plain = pa.Differential()
    divided = p.x(plain, q=p.q / tau, q2=p.q2 / tau2)
    assert_close(layer(**p.x(layer, tau=tau, tau2=tau2)), plain(**divided), size=p.size)
    shared = pa.parse("differential(temperature)")
    divided = p.x(plain, q=p.q / tau, q2=p.q2 / tau)
    assert_close(shared(**p.x(shared, tau=tau)), plain(**divided), size=p.size)


# LASER


@pytest.mark.parametrize("per", PER)
@sampled
@given(p=problems(square=False, heights=[1.0, 300.0]), size=st.floats(-1e3, 1e3))
def test_over_laser_shifted_values_shift_the_output_by_one_minus_lambda_times_that(per, p, size):
    """f(V + c) = f(V) + (1 − λ) c, and not f(V) + c."""
    layer, lam = pa.Differential(pa.Laser(), per=per), over_heads(p.lams[per])
    shift = size * p.rng.normal(size=p.v.shape[-1])
    out, shifted = layer(**p.x(layer)), layer(**p.x(layer, v=p.v + shift))
    slack = p.size + 10 * np.abs(shift).max()
    assert_close(shifted, out + (1 - lam) * shift, size=slack)
    assert_close(np.abs(shifted - out - shift), np.abs(lam * shift), size=slack)


def test_over_laser_a_shift_by_the_full_constant_is_wrong_by_lambda():
    p = DifferentialProblem(np.random.default_rng(0), t=5)
    layer = pa.Differential(pa.Laser())
    x = p.x(layer, lam=np.asarray(0.5))
    out, shifted = layer(**x), layer(**(x | {"v": p.v + 100.0}))
    assert_close(shifted - out, 50.0)
    assert np.abs(shifted - (out + 100.0)).min() > 49


@pytest.mark.parametrize("per", PER)
@sampled
@given(p=problems(square=False))
def test_over_laser_values_hundreds_apart_give_finite_and_exact_outputs(per, p):
    layer = pa.Differential(pa.Laser(), per=per)
    v = p.v + p.rng.choice([-700.0, -300.0, 0.0, 300.0, 700.0], size=p.v.shape)
    x = p.x(layer, v=v)
    out, pullback = layer.vjp(**x)
    assert_close(out, definition(layer, x), size=p.size + 7000)
    assert all(np.all(np.isfinite(gradient)) for gradient in pullback(p.like_output()).values())


@sampled
@given(problems(square=False))
def test_over_laser_small_values_give_differential_attention(p):
    laser, plain = pa.Differential(pa.Laser()), pa.Differential()
    small = laser(**p.x(laser, v=1e-6 * p.v)) / 1e-6
    expected = plain(**p.x(plain))
    spread = np.ptp(p.v)
    assert np.abs(small - expected).max() <= 1e-6 * 3 * spread**2 / 8 + 1e-8  # Hoeffding.


# LUCID


@sampled
@given(problems(square=False))
def test_over_lucid_each_map_solves_with_its_own_keys(p):
    layer, plain = pa.Differential(pa.Lucid()), pa.Softmax()
    first = plain(p.q, p.k, solved_values(p.k, p.v))
    second = plain(p.q2, p.k2, solved_values(p.k2, p.v))
    assert_close(layer(**p.x(layer)), first - p.lams["layer"] * second, size=p.size)


def test_over_lucid_the_second_map_does_not_use_the_first_solve():
    p = DifferentialProblem(np.random.default_rng(0), t=6, d=2)
    layer, plain = pa.Differential(pa.Lucid()), pa.Softmax()
    y = solved_values(p.k, p.v)
    wrong = plain(p.q, p.k, y) - p.lams["layer"] * plain(p.q2, p.k2, y)
    assert np.abs(layer(**p.x(layer)) - wrong).max() > 0.01


# Gradients


@pytest.mark.parametrize("layer", LAYERS)
@sampled
@given(p=problems(square=False))
def test_gradient_of_lambda_is_minus_the_second_map_under_the_cotangent(layer, p):
    layer = pa.parse(layer)
    x, cotangent = p.x(layer), p.like_output()
    _, pullback = layer.vjp(**x)
    expected = -np.sum(cotangent * two_maps(layer, x)[1], axis=-1)
    axes = {"layer": (0, 1, 2), "head": (0, 1), "token": ()}[layer.per]
    gradient = pullback(cotangent)["lam"]
    assert gradient.shape == x["lam"].shape
    assert_close(gradient, expected.sum(axes), size=100 * p.size)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("base", ["softmax", "laser", "lucid"])
@sampled
@given(p=problems(square=False))
def test_the_second_map_gets_the_cotangent_times_minus_lambda(base, per, p):
    base = pa.parse(base)
    layer = pa.Differential(base, per=per)
    x, cotangent = p.x(layer), p.like_output()
    _, pullback = layer.vjp(**x)
    gradients = pullback(cotangent)
    first = base.vjp(p.q, p.k, p.v)[1](cotangent)
    second = base.vjp(p.q2, p.k2, p.v)[1](-over_heads(x["lam"]) * cotangent)
    size = 100 * p.size * max(1, *(np.abs(g).max() for g in (*first.values(), *second.values())))
    assert_close(gradients["q"], first["q"], size=size)
    assert_close(gradients["k"], first["k"], size=size)
    assert_close(gradients["q2"], second["q"], size=size)
    assert_close(gradients["k2"], second["k"], size=size)
    assert_close(gradients["v"], first["v"] + second["v"], size=size)


# Caches


@pytest.mark.parametrize(
    ("layer", "stored"),
    [
        ("differential", ["k", "k2", "v"]),
        ("differential[per=token]", ["k", "k2", "v"]),
        ("differential(laser)", ["k", "k2", "v"]),
        ("differential[paired=q]", ["k", "v"]),
        ("differential[paired=k]", ["k", "k2", "v"]),
    ],
)
def test_the_cache_holds_what_the_maps_share_once(layer, stored):
    p, layer = DifferentialProblem(np.random.default_rng(0), t=4), pa.parse(layer)
    assert sorted(layer.init_cache(**p.x(layer), capacity=4).store) == stored


def test_the_cache_of_lucid_and_path_holds_what_each_map_needs():
    p = DifferentialProblem(np.random.default_rng(0), t=4, d=3)
    stores = {
        text: pa.parse(text).init_cache(**p.x(pa.parse(text)), capacity=4).store
        for text in [
            "differential(lucid)",
            "differential[paired=q](lucid)",
            "differential(path)",
            "differential[paired=q](path)",
        ]
    }
    widths = {
        text: sorted(buffer.shape[-1] for buffer in store.values() if buffer.ndim == 4)
        for text, store in stores.items()
    }
    assert widths["differential(lucid)"] == [2, 2, 3, 3]  # y, y₂, k, k₂
    assert widths["differential[paired=q](lucid)"] == [2, 3]  # One solve, read twice.
    assert widths["differential(path)"] == [2, 3, 3]
    assert widths["differential[paired=q](path)"] == [2, 3]


# Construction and text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("differential(differential)", r"two maps already, with q2, k2"),
        ("differential(row_normalized(differential))", r"two maps already"),
        ("laser(differential)", r"laser needs a base that reads a mean of its values"),
        ("lucid(differential)", r"lucid needs a base that exponentiates a score function"),
        ("temperature(differential)", r"would reach .*, k2; write differential\(temperature\)$"),
        (
            "per_dim_scale(differential)",
            r"would reach .*, k2; write differential\(per_dim_scale\)$",
        ),
        ("qk_norm(differential)", r"would reach .*, k2; write differential\(qk_norm\)$"),
        ("differential[paired=q/w]", r"paired names w, and the base takes q, k, v"),
        ("differential[paired=q/k/beta](lucid)", r"paired names beta, and the base takes q, k, v"),
        ("differential[paired=lucid_beta](lucid)", r"paired names lucid_beta"),
    ],
)
def test_compositions_that_make_no_sense_are_refused_with_the_reason(text, reason):
    with pytest.raises(TypeError, match=rf"^{re.escape(text)} makes no sense: .*{reason}"):
        pa.parse(text)


@pytest.mark.parametrize("paired", [(), ("q", "q")])
def test_paired_must_be_different_names(paired):
    with pytest.raises(ValueError, match="option paired must be different names"):
        pa.Differential(paired=paired)


def test_per_must_be_one_of_three_names():
    with pytest.raises(ValueError, match="option per must be one of 'layer', 'head', 'token'"):
        pa.Differential(per="batch")


@pytest.mark.parametrize("per", PER)
def test_a_lambda_of_another_shape_is_refused(per):
    p, layer = DifferentialProblem(np.random.default_rng(0), t=4, n=3), pa.Differential(per=per)
    for other in PER:
        if other != per:
            with pytest.raises(pa.ShapeError, match="lam"):
                layer(**p.x(layer, lam=p.lams[other]))


def test_text_omits_defaults_and_contains_the_paired_names():
    assert str(pa.Differential()) == "differential"
    assert str(pa.Differential(per="head", paired=("q", "k"))) == "differential[per=head]"
    assert str(pa.Differential(paired=("q",))) == "differential[paired=q]"
    everything = pa.Differential(pa.Path(), paired=("q", "k", "w", "beta"))
    assert str(everything) == "differential[paired=q/k/w/beta](path)"
    assert pa.parse("differential[paired=q/k/w/beta](path)") == everything
    assert pa.parse("differential[paired=q/k]") == pa.Differential()


# Pairs of heads


PAIRS = {"adjacent": lambda i, h: (2 * i, 2 * i + 1), "halves": lambda i, h: (i, i + h)}


@pytest.mark.parametrize("layout", PAIRS)
@pytest.mark.parametrize("pairs", [1, 2, 3, 4])
def test_heads_split_by_their_layout(layout, pairs):
    x = np.arange(2 * 3 * 2 * pairs * 5.0).reshape(2, 3, 2 * pairs, 5)
    first, second = pa.split_heads(x, layout)
    assert first.shape == second.shape == (2, 3, pairs, 5)
    for i in range(pairs):
        one, other = PAIRS[layout](i, pairs)
        np.testing.assert_array_equal(first[:, :, i], x[:, :, one])
        np.testing.assert_array_equal(second[:, :, i], x[:, :, other])


@pytest.mark.parametrize("layout", PAIRS)
@pytest.mark.parametrize("pairs", [1, 2, 3, 4])
def test_values_of_a_pair_are_concatenated(layout, pairs):
    v = np.arange(2 * 3 * 2 * pairs * 5.0).reshape(2, 3, 2 * pairs, 5)
    paired = pa.pair_values(v, layout)
    assert paired.shape == (2, 3, pairs, 10)
    for i in range(pairs):
        one, other = PAIRS[layout](i, pairs)
        np.testing.assert_array_equal(paired[:, :, i, :5], v[:, :, one])
        np.testing.assert_array_equal(paired[:, :, i, 5:], v[:, :, other])


@pytest.mark.parametrize("layout", PAIRS)
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_heads_of_other_libraries_split_alike_and_keep_their_library(layout, library):
    torch = pytest.importorskip("torch")
    jax_numpy = pytest.importorskip("jax.numpy")
    make, kind = {
        "torch": (torch.asarray, torch.Tensor),
        "jax": (jax_numpy.asarray, jax_numpy.ndarray),
    }[library]
    x = np.arange(48.0).reshape(1, 2, 6, 4)
    result = [*pa.split_heads(make(x), layout), pa.pair_values(make(x), layout)]
    expected = [*pa.split_heads(x, layout), pa.pair_values(x, layout)]
    for theirs, ours in zip(result, expected, strict=True):
        assert isinstance(theirs, kind)
        np.testing.assert_array_equal(np.asarray(theirs), ours)


def test_torch_differentiates_through_the_pairs():
    torch = pytest.importorskip("torch")
    x = torch.arange(24.0, dtype=torch.float64).reshape(1, 2, 4, 3).requires_grad_()
    first, second = pa.split_heads(x, "adjacent")
    (first - 2 * second).sum().backward()
    np.testing.assert_array_equal(x.grad[0, 0, :, 0], [1, -2, 1, -2])


@pytest.mark.parametrize("layout", PAIRS)
def test_grouped_heads_pair_as_queries_and_keys_of_one_pair(layout):
    """Pair i of four reads key/value pair ⌊i/2⌋ of two: eight query heads, four key/value heads."""
    rng = np.random.default_rng(0)
    queries, keys, values = (rng.normal(size=(1, 5, heads, 3)) for heads in (8, 4, 4))
    (q, q2), (k, k2) = pa.split_heads(queries, layout), pa.split_heads(keys, layout)
    out = pa.Differential()(q, k, pa.pair_values(values, layout), q2=q2, k2=k2, lam=np.asarray(0.7))
    assert out.shape == (1, 5, 4, 6)
    for i in range(4):
        heads, shared = PAIRS[layout](i, 4), PAIRS[layout](i // 2, 2)
        v = np.concatenate([values[:, :, [j]] for j in shared], axis=-1)
        first, second = (
            pa.Softmax()(queries[:, :, [head]], keys[:, :, [j]], v)
            for head, j in zip(heads, shared, strict=True)
        )
        assert_close(out[:, :, [i]], first - 0.7 * second, size=10)


@pytest.mark.parametrize("function", [pa.split_heads, pa.pair_values])
def test_arrays_without_pairs_of_heads_are_refused(function):
    x = np.zeros((1, 2, 4, 3))
    with pytest.raises(ValueError, match=r"even number of heads; found \(1, 2, 3, 3\)"):
        function(x[:, :, :3], "halves")
    with pytest.raises(ValueError, match=r"shape \(b, t, 2h, d\).*found \(2, 4, 3\)"):
        function(x[0], "adjacent")
    with pytest.raises(ValueError, match="layout must be 'adjacent' or 'halves'; found 'pairs'"):
        function(x, "pairs")
    with pytest.raises(TypeError, match="list"):
        function(x.tolist(), "halves")
    with pytest.raises(TypeError):
        function(x)
