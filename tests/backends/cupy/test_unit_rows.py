"""Rows of unit norm in CUDA: against the definition in float64, in every dtype."""

import numpy as np
import pytest

import precondattn as pa
from precondattn_kernel_tools.cuda_simulator import checked
from tests.backends.cupy.simulated import DTYPES, ORDERS, TOLERANCES, error
from tests.kernel_tools.toolchain import needs_simulator

BACKEND = ("cupy",)


def rows(*shape, dtype, seed=0):
    """Random rows: some zero, some equal, some of another size."""
    o = np.random.default_rng(seed).normal(size=shape)
    o[:, 1::4] = 0
    o[:, 2::4] = o[:, :1]
    return o.astype(dtype)


@pytest.mark.thorough(but=("1-1-1-float16-False-None", "1-1-1-float32-False-None"))
@needs_simulator
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("t", "h", "e"), [(1, 1, 1), (5, 3, 20), (9, 2, 33), (3, 1, 515)])
def test_rows_and_their_gradient(t, h, e, dtype, detach, order):
    leaf = pa.UnitRows(detach=detach, eps=1e-3)
    o, d_y = (rows(2, t, h, e, dtype=DTYPES[dtype], seed=seed) for seed in (0, 1))
    with checked(order):
        y, pullback = leaf.vjp(o, backend=BACKEND)
        result = pullback(d_y)["o"]
    assert y.dtype == result.dtype == DTYPES[dtype]
    expected, pullback = leaf.vjp(o.astype(np.float64), backend="reference")
    assert error(y, expected) < TOLERANCES[dtype]
    scale = 1 if dtype != "float16" else 8  # After a division by ε, numbers are large.
    assert error(result, pullback(d_y.astype(np.float64))["o"]) < scale * TOLERANCES[dtype]


@needs_simulator
@pytest.mark.parametrize("detach", [True, False])
def test_rows_about_as_long_as_eps(detach):
    rng = np.random.default_rng(0)
    o, d_y = rng.normal(size=(2, 1, 24, 2, 40)) / 6
    o *= np.linspace(0.3, 2.0, 24)[:, None, None]
    o[:, 12:] *= np.arange(40) == 31  # One entry, that of a warp's last thread.
    leaf = pa.UnitRows(detach=detach, eps=1.0 / 8)
    y, pullback = leaf.vjp(o.astype(np.float32), backend=BACKEND)
    result = pullback(d_y.astype(np.float32))["o"]
    expected, pullback = leaf.vjp(o, backend="reference")
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result, pullback(d_y)["o"], rtol=1e-4, atol=1e-5)


@needs_simulator
@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e20, 3e38])
def test_rows_whose_squares_overflow_or_vanish(size):
    o = (np.random.default_rng(0).uniform(-1, 1, size=(1, 4, 2, 8)) * size).astype(np.float32)
    y = pa.UnitRows(eps=0)(o, backend=BACKEND)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), 1, rtol=1e-5)


@needs_simulator
@pytest.mark.parametrize(("dtype", "eps"), [("float32", 1e-45), ("float64", 5e-324)])
@pytest.mark.parametrize("detach", [True, False])
def test_an_eps_whose_reciprocal_is_infinite_counts_as_zero(detach, dtype, eps):
    o = rows(2, 4, 1, 8, dtype=DTYPES[dtype])
    d_y = np.ones_like(o)
    (y, gradient), expected = (
        (y, pullback(d_y)["o"])
        for y, pullback in (
            pa.UnitRows(detach=detach, eps=least).vjp(o, backend=BACKEND) for least in (eps, 0.0)
        )
    )
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(y, expected[0])
    np.testing.assert_array_equal(gradient, expected[1])


@needs_simulator
def test_any_strides_give_the_same_rows():
    o = rows(2, 6, 3, 16, dtype=np.float32)
    turned = np.ascontiguousarray(o.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    odd = np.zeros((2, 6, 3, 17), np.float32)[..., 1:]
    odd[...] = o
    for view in (turned, odd):
        np.testing.assert_array_equal(pa.UnitRows()(view, backend=BACKEND), pa.UnitRows()(o))


def test_unsupported_rows_are_declined():
    o = np.zeros((1, 2, 2, 8))
    with pytest.raises(pa.UnsupportedError, match="not of channels"):
        pa.UnitRows(axis="channel")(o, backend=BACKEND)


@needs_simulator
def test_a_gradient_that_overflows_in_float16_is_declined():
    o = np.zeros((1, 2, 2, 8), np.float16)
    assert pa.UnitRows()(o, backend=BACKEND).dtype == np.float16
    with pytest.raises(pa.UnsupportedError, match="if eps is at least"):
        pa.UnitRows().vjp(o, backend=BACKEND)
