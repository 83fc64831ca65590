"""Compositions beyond pairs, drawn at random, and their programs."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import precondattn as pa
from precondattn.algebra.declaration import Axis, Pattern
from precondattn_conformance.case import Case
from precondattn_conformance.cases import makes_sense
from precondattn_conformance.checks import run
from precondattn_conformance.declared import compositions, is_bounded
from precondattn_conformance.grid import MASKED, PACKED, RAGGED
from precondattn_conformance.inputs import PLAIN, CallLayout, make_inputs

OUTER = ["differential", "laser", "lucid", "per_dim_scale", "qk_norm", "row_normalized"]
OUTER += ["temperature", "lucid[beta=true]", "lucid[normalize=queries_and_keys]"]
OUTER += ["differential[per=head]", "differential[per=token]", "qk_norm[norm=layer,gain=true]"]
OUTER += ["row_normalized[detach=false]", "temperature[per=head]"]
BASES = ["softmax", "softmax[window=3]", "softmax[scale=0.5,bias=true]", "softmax[causal=false]"]
BASES += ["path", "path[flush=3]", "path[forget=unscaled]", "path[window=3,bias=true,flush=2]"]
CHECKS = ["outputs", "gradients", "caching"]
"""Layouts that make sense for nearly all mechanisms."""


LAYOUTS = [PLAIN, RAGGED, PACKED, MASKED]


def reason_against(text):
    """Why this nesting is refused, or None."""
    try:
        pa.parse(text)
    except TypeError as refusal:
        return str(refusal)
    return None


@functools.cache
def around(inner):
    """All nestings of one more mechanism around `inner` that are not refused."""
    reasons = {text: reason_against(text) for text in (f"{outer}({inner})" for outer in OUTER)}
    assert all(reason is None or "makes no sense" in reason for reason in reasons.values())
    return [text for text, reason in reasons.items() if reason is None]


@st.composite
def nested(draw):
    """Three or four mechanisms around one another; three where every fourth is refused."""
    text = draw(st.sampled_from([pair for base in BASES for pair in around(base) if around(pair)]))
    for _ in range(draw(st.integers(1, 2))):
        if choices := around(text):
            text = draw(st.sampled_from(choices))
    return str(pa.parse(text))


@st.composite
def case_of_a_nesting(draw):
    """A case of a nesting: a check and a layout that make sense for it."""
    text = draw(nested())
    cases = [
        Case(check, text, "numpy", "float64", layout, "clustered")
        for check in CHECKS
        for layout in LAYOUTS
    ]
    return draw(st.sampled_from([case for case in cases if makes_sense(case)]))


@pytest.mark.thorough
@given(case_of_a_nesting())
def test_any_nesting_that_is_not_refused_has_output_gradient_and_cache(case):
    """Gradients are compared with central differences unless a part is detached."""
    assert is_bounded(pa.parse(case.mechanism))
    run(case)


@given(nested())
def test_text_and_program_of_any_nesting_are_read_back(text):
    m = pa.parse(text)
    assert pa.parse(str(m)) == m
    group = pa.group_of(m)
    from precondattn.algebra.group import read_mechanism

    if len(group.calls) > 1:
        assert read_mechanism(str(group)).program == group
        assert read_mechanism(str(group)).program.inputs == group.inputs


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("temperature(lucid)", "lucid(temperature)"),
        ("qk_norm(lucid)", "lucid(qk_norm)"),
        ("qk_norm(laser(path))", "laser(qk_norm(path))"),
    ],
)
def test_equivalent_mechanisms_have_the_same_group_of_calls(first, second):
    """A kernel claimed for one of them is used for the other."""
    assert pa.group_of(first) == pa.group_of(second)


def test_the_patterns_of_inputs_are_those_of_the_base():
    """QK-norm's leaf declares axes `t` and `h` for whatever it normalises."""
    for text in ("qk_norm", "lucid(qk_norm)", "differential(qk_norm)"):
        inputs = pa.parse(text).inputs
        for name in {"k", "k2"} & set(inputs):
            assert str(inputs[name]) == "b s n d"
    layout = {"q": (1, 2, 4, 8), "k": (1, 5, 2, 8), "v": (1, 5, 2, 3)}
    rng = np.random.default_rng(0)
    x = {name: rng.normal(size=shape) for name, shape in layout.items()}
    assert pa.QKNorm()(**x).shape == (1, 2, 4, 3)


def test_patterns_are_read_back_through_multiples():
    axes = {"d": Axis("e", 3), "t": Axis("s")}
    assert str(Pattern.read("b t h 2*d").substituted(axes)) == "b s h 6*e"
    assert str(Pattern.read("b t 64").substituted({"t": Axis(".", 8)})) == "b 8 64"


def test_every_pair_is_a_mechanism_or_refused_with_a_reason():
    for text, reason in compositions().items():
        assert reason is None or "makes no sense: " in reason, text


@pytest.mark.parametrize(
    ("library", "base"),
    [
        *(("torch", base) for base in ("softmax", "softmax[window=9]", "lucid", "laser", "linear")),
        ("jax.numpy", "softmax"),
    ],
)
def test_nearly_equal_maps_in_bfloat16_are_subtracted_before_they_are_rounded(library, base):
    xp = pytest.importorskip(library)
    m = pa.parse(f"differential({base})")
    rng = np.random.default_rng(0)
    x = make_inputs(m, CallLayout("test", t=32, s=32), "random")
    for name in m.paired:
        x[f"{name}2"] = x[name] + 0.05 * rng.normal(size=x[name].shape)
    x["lam"] = np.asarray(0.8)
    half = {name: xp.asarray(a, dtype=xp.bfloat16) for name, a in x.items()}
    rounded = {name: in_float64(a) for name, a in half.items()}
    expected, pullback = m.vjp(**rounded, backend="reference")
    gradients = pullback(np.ones_like(expected))
    out, pullback_in_half = m.vjp(**half)
    found = pullback_in_half(xp.ones_like(out))
    step, _ = m.extend(m.init_cache(**half, capacity=32), **half)
    for result, true in (
        (out, expected),
        (m(**half), expected),
        (step, expected),
        *((found[name], gradients[name]) for name in gradients),
    ):
        # One rounding of every element is at most 2^-9 of it.
        assert np.linalg.norm(in_float64(result) - true) < 2**-8 * np.linalg.norm(true)


def in_float64(array):
    array = array.float() if hasattr(array, "float") else array
    return np.asarray(array).astype(np.float64)
