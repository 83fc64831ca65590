"""Packed segments of leaves that sum over all tokens, one after another.

The core divides a packed call into batches where it knows the segments. So a call is made here that
it does not divide.
"""

import numpy as np
import pytest

import precondattn as pa
from precondattn.frame import Frame
from precondattn.spec import nystrom
from precondattn_portable import banded_convolution
from precondattn_portable.arithmetic import IN_PLACE, STANDARD
from precondattn_portable.backend import ALGORITHMS, algorithm_at
from tests.mathematics.identities import assert_close

SEGMENTS = np.asarray([[0] * 5 + [1] * 7 + [2] * 2, [4] * 13 + [3]])
VALID = np.arange(14) != 3


def call_of(expression):
    m, rng = pa.parse(expression), np.random.default_rng(0)
    x = {name: rng.normal(size=(2, 14, 4 if name == "q" else 2, 3)) for name in "qkv"}
    others = {"skip": (4, 5), "logit_scale": (4,)}
    x |= {name: rng.normal(size=shape) for name, shape in others.items() if name in m.inputs}
    return m, x, rng.normal(size=x["q"].shape)


@pytest.mark.parametrize("ops", [IN_PLACE, STANDARD], ids=["in place", "standard"])
@pytest.mark.parametrize("mask", ["", "queries", "keys"])
@pytest.mark.parametrize(
    "expression",
    [
        "channel",
        "channel[scale_by=tokens]",
        "cross_covariance",
        "nystrom[landmarks=3]",
        "nystrom[landmarks=4,skip=true]",
    ],
)
def test_a_packed_call_is_that_of_the_definition(expression, mask, ops):
    m, x, cotangent = call_of(expression)
    valid = np.broadcast_to(VALID, (2, 14))
    at = np.arange(14)[None]
    q_valid, k_valid = (valid if mask == name else None for name in ("queries", "keys"))
    cotangent = np.where(VALID[:, None, None], cotangent, 0) if mask == "queries" else cotangent
    frame = Frame(at, at, q_valid, k_valid, SEGMENTS, SEGMENTS)
    algorithm = algorithm_at(ALGORITHMS[type(m)])(ops, m)
    given = {name: array.copy() for name, array in x.items()}
    out, residuals = algorithm.forward(given, frame)
    expected, _ = m.forward(x, frame)
    seen = VALID if mask == "queries" else slice(None)
    assert_close(out[:, seen], expected[:, seen])
    found = algorithm.backward(given, frame, out, residuals, cotangent)
    for name, gradient in m.backward(x, frame, expected, (), cotangent).items():
        assert_close(found[name], gradient)
        np.testing.assert_array_equal(given[name], x[name])


def test_under_jit_segments_are_summed_in_a_loop():
    jax = pytest.importorskip("jax")
    for expression in ("cross_covariance", "nystrom[landmarks=3]"):
        m, x, _ = call_of(expression)
        expected = m(**x, segment_ids=SEGMENTS)
        arrays = {name: jax.numpy.asarray(array) for name, array in x.items()}
        packed = jax.jit(lambda x, ids, m=m: m(**x, segment_ids=ids))
        assert "while" in str(jax.make_jaxpr(packed)(arrays, jax.numpy.asarray(SEGMENTS)))
        out = packed(arrays, jax.numpy.asarray(SEGMENTS))
        assert_close(np.asarray(out), expected)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    ("taps", "tokens"), [(1, 130), (2, 1), (5, 30), (5, 130), (64, 64), (65, 130), (65, 30)]
)
def test_it_is_that_of_the_definition_and_so_are_its_gradients(tokens, taps, dtype, library):
    """Outputs and gradients; PyTorch's own convolution has a wrong gradient with 65 weights."""
    ops, array = IN_PLACE, pytest.importorskip(library).asarray
    if library == "torch":
        from precondattn_torch.arithmetic import TORCH

        ops = TORCH
    rng = np.random.default_rng(taps)
    v, d_y = rng.normal(size=(2, 2, 3, tokens, 4)).astype(dtype)
    weight = rng.normal(size=(3, taps)).astype(dtype)
    found = (
        banded_convolution.convolved(ops, array(v), array(weight)),
        *banded_convolution.convolved_vjp(ops, array(v), array(weight), array(d_y)),
    )
    v, d_y, weight = (x.astype(np.float64) for x in (v, d_y, weight))
    expected = (
        nystrom.convolved(v, weight),
        *nystrom.convolved_vjp(v, weight, d_y),
    )
    for one, other in zip(found, expected, strict=True):
        size = 1e-12 if dtype == "float64" else 1e-5
        np.testing.assert_allclose(np.asarray(one), other, rtol=0, atol=size * np.abs(other).max())
