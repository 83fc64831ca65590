"""Shorthands: functions that are a call of a class with the options that their arguments say."""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.identities import assert_close
from tests.mathematics.problems import Problem

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


@pytest.mark.parametrize(("shorthand", "options", "text"), SHORTHANDS)
def test_a_shorthand_equals_a_call_of_its_class(shorthand, options, text):
    p = Problem(s=5, n=2, group=2)
    layer = pa.parse(text or "temperature(softmax[causal=false,scale=0.3])")
    x = p.x(layer, q2=p.q[::-1], k2=p.k[::-1], lam=np.asarray(0.7))
    if options.get("forget"):
        x["g"] = -p.rng.uniform(size=(2, 5, 4))
    arrays, named = [x.pop(name) for name in "qkv"], x
    expected, result = layer(*arrays, **named), shorthand(*arrays, **named, **options)
    np.testing.assert_array_equal(result, expected)


PER = [
    *((pa.temperature, pa.Temperature, "tau", per) for per in ("layer", "head")),
    *((pa.differential, pa.Differential, "lam", per) for per in ("layer", "head", "token")),
]


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(("shorthand", "cls", "name", "per"), PER)
def test_a_shorthand_infers_per_from_the_number_of_axes(shorthand, cls, name, per, library):
    array = pytest.importorskip(library).asarray
    p = Problem(s=5, n=2, group=2)
    shape = {"layer": (), "head": (4,), "token": (2, 5, 4)}[per]
    layer = cls(per=per)
    x = p.x(layer, **{name: np.asarray(p.rng.uniform(0.3, 3, size=shape))})
    x = {each: array(a) for each, a in x.items()}
    np.testing.assert_array_equal(np.asarray(shorthand(**x)), np.asarray(layer(**x)))


def test_a_single_head_has_its_own_temperature():
    p = Problem(s=5)
    tau = np.array([0.5])
    expected = pa.Temperature()(p.q, p.k, p.v, tau=tau[0, ...])
    assert_close(pa.temperature(p.q, p.k, p.v, tau=tau), expected)


def test_gains_switch_the_gain_on():
    p = Problem(s=5, n=2, group=2)
    gains = {f"{name}_gain": p.rng.normal(size=3) for name in "qk"}
    for norm in ("rms", "layer"):
        layer = pa.QKNorm(norm=norm, gain=True)
        result = pa.qk_norm(p.q, p.k, p.v, **gains, norm=norm)
        np.testing.assert_array_equal(result, layer(p.q, p.k, p.v, **gains))


def test_a_shorthand_names_an_unknown_keyword():
    p = Problem(s=5)
    with pytest.raises(TypeError, match=r"temperature: unknown keyword 'tua'.*'tau'"):
        pa.temperature(p.q, p.k, p.v, tua=np.asarray(0.7))
    with pytest.raises(pa.ShapeError, match="tau"):
        pa.temperature(p.q, p.k, p.v, tau=np.asarray(0.7), per="head")
    with pytest.raises(TypeError, match="per_dim"):
        pa.per_dim_scale(p.q, p.k, p.v)
