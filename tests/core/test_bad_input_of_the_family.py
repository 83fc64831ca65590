"""Bad options and inputs of PaTH, differential, row-normalised and query-side mechanisms."""

import re

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs

LAYOUT = CallLayout("test", t=4, s=4, h=4, n=2, d=3, e=2)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: pa.Path(flush=0),
            "path: option flush must be a whole number, 1 to 1073741824; found 0",
        ),
        (lambda: pa.Path(flush=None), "path: option flush must be a whole number"),
        (lambda: pa.Path(flush=True), "path: option flush must be a whole number"),
        (lambda: pa.Path(forget="yes"), "path: option forget must be one of 'none', 'unscaled'"),
        (lambda: pa.parse("path[causal=false]"), "path has no option 'causal'"),
        (
            lambda: pa.Softmax(causal=False, forget="scaled"),
            "softmax: a forget gate decays from the key to the query, forward in time, and needs "
            "causal=true; found forget='scaled' and causal=false",
        ),
        (lambda: pa.Differential(per="batch"), "differential: option per must be one of 'layer'"),
        (lambda: pa.Differential(paired=()), "option paired must be different names, such as q/k"),
        (lambda: pa.Differential(paired="q/q"), "option paired must be different names"),
        (lambda: pa.Differential(paired="q/2"), "option paired must be different names"),
        (lambda: pa.Differential(paired=3), "option paired must be different names"),
        (lambda: pa.Temperature(per="token"), "temperature: option per must be one of 'layer'"),
        (lambda: pa.QKNorm(norm="batch"), "qk_norm: option norm must be one of 'rms', 'layer'"),
        (lambda: pa.QKNorm(eps=-1), "qk_norm: option eps must be a finite number, 0 or above"),
        (lambda: pa.RowNormalized(axis="row"), "row_normalized: option axis must be one of 'auto'"),
        (lambda: pa.RowNormalized(detach=1), "row_normalized: option detach must be true or false"),
        (
            lambda: pa.parse("lucid_solve[metric=transported/0]"),
            "lucid_solve: option metric must be one of dot, transported, transported/2",
        ),
        (lambda: pa.LucidSolve(metric="cosine"), "option metric must be one of dot, transported"),
    ],
)
def test_an_option_out_of_its_range_is_refused(build, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        build()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("differential[paired=q/w]", "paired names w, and the base takes q, k, v"),
        ("row_normalized[axis=channel]", "the norm of a channel runs over all tokens"),
        ("lucid[normalize=queries_and_keys](qk_norm)", "normalises what reaches the base"),
        ("temperature(lucid[normalize=queries_and_keys])", "divides out what temperature does"),
        ("qk_norm(row_normalized(differential))", "the first of two maps only, not q2, k2"),
        ("temperature(laser(temperature))", "tau is an input of laser(temperature) already"),
    ],
)
def test_an_incompatible_base_is_refused_with_the_reason(text, reason):
    with pytest.raises(TypeError, match="makes no sense.*" + re.escape(reason)):
        pa.parse(text)


@pytest.mark.parametrize(
    ("text", "changed", "message"),
    [
        ("path", {"w": (2, 4, 4, 3)}, "path: w is declared (b s n d), found shape (2, 4, 4, 3)"),
        ("path", {"w": (2, 4, 2, 2)}, "axis 3 (d) is 2, but 3 in q"),
        ("path", {"beta": (2, 4, 2, 1)}, "beta is declared (b s n), found shape (2, 4, 2, 1)"),
        ("path[forget=scaled]", {"g": (2, 4, 2)}, "g is declared (b s h), found shape (2, 4, 2)"),
        ("differential", {"lam": (4,)}, "lam is declared (), found shape (4,): 0 axes expected"),
        ("differential[per=head]", {"lam": ()}, "lam is declared (h), found shape (): 1 axes"),
        ("differential[per=token]", {"lam": (2, 4, 1)}, "axis 2 (h) is 1, but 4 in q"),
        (
            "differential",
            {"k2": (2, 3, 2, 3)},
            "k2 is declared (b s n d), found shape (2, 3, 2, 3)",
        ),
        ("temperature", {"tau": (1,)}, "tau is declared (), found shape (1,)"),
        ("per_dim_scale", {"per_dim": (4,)}, "per_dim is declared (d), found shape (4,)"),
        ("qk_norm[gain=true]", {"k_gain": (2, 3)}, "k_gain is declared (d), found shape (2, 3)"),
    ],
)
def test_an_input_of_the_wrong_shape_is_refused(text, changed, message):
    m = pa.parse(text)
    x = make_inputs(m, LAYOUT, "random") | {n: np.ones(shape) for n, shape in changed.items()}
    for run in (m, m.vjp):
        with pytest.raises(pa.ShapeError, match=re.escape(message)):
            run(**x)


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("path", "beta"),
        ("differential", "lam"),
        ("temperature", "tau"),
        ("qk_norm[gain=true]", "k_gain"),
    ],
)
def test_a_missing_input_is_named(text, missing):
    m = pa.parse(text)
    x = make_inputs(m, LAYOUT, "random")
    del x[missing]
    with pytest.raises(TypeError, match=f"missing {missing}; "):
        m(**x)


def test_a_python_number_is_refused_where_an_array_is_needed():
    x = make_inputs(pa.Differential(), LAYOUT, "random")
    with pytest.raises(TypeError, match=r"lam must be an array of NumPy.* found float"):
        pa.Differential()(**x | {"lam": 0.5})


def test_a_cache_with_another_flush_interval_is_refused():
    eager, lazy, lazier = pa.Path(), pa.Path(flush=2), pa.Path(flush=3)
    x = make_inputs(eager, LAYOUT, "random")
    with pytest.raises(ValueError, match="the cache is of another mechanism"):
        lazy.extend(eager.init_cache(**x, capacity=8), **x)
    with pytest.raises(pa.ShapeError, match=r"pending\(w\)' has shape \(2, 3, 2, 3\)"):
        lazy.extend(lazier.init_cache(**x, capacity=8), **x)
    assert lazy.init_cache(**x, capacity=8).store["pending(w)"].shape == (2, 2, 2, 3)


def test_second_keys_are_of_the_calls_dtype_and_gates_may_be_wider():
    """Otherwise a cache would silently store float32 keys in half precision."""
    m = pa.Differential(pa.Path(forget="scaled"), per="head")
    x = {n: a.astype(np.float16) for n, a in make_inputs(m, LAYOUT, "random").items()}
    with pytest.raises(TypeError, match=r"inputs of one dtype expected.*'k2': 'float32'"):
        m(**x | {"k2": x["k2"].astype(np.float32)})
    wide = {n: x[n].astype(np.float32) for n in ("w", "beta", "g", "lam")}
    assert m(**x | wide).dtype == np.float16


def test_init_cache_names_the_inputs_from_which_a_size_follows():
    m = pa.Softmax(forget="unscaled")
    x = make_inputs(m, LAYOUT, "random")
    with pytest.raises(pa.ShapeError, match=r"can not infer the size of h .* pass q, g too"):
        m.init_cache(k=x["k"], v=x["v"], capacity=4)


def test_path_is_not_an_instance_of_softmax():
    assert not isinstance(pa.Path(), pa.Softmax)
