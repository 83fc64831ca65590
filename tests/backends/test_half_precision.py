"""Compositions in half precision: what passes from one piece to the next is not rounded."""

import numpy as np
import pytest

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs


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
