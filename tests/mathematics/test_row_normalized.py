"""Row-normalised attention of values whose size is 0, tiny or huge.

The definition is y_i = o_i / max(‖o_i‖, ε), o being the output of the base, row by row and head by
head; the norm is constant to the gradient unless `detach=False`. Outputs and gradients are
compared in `test_definitions.py`. Everything is float64, and an identity has to hold to 1e-10 of
the largest number involved.
"""

import numpy as np
import pytest

import precondattn as pa
from tests.mathematics.identities import assert_close
from tests.mathematics.problems import Problem


def length(x, axis=-1):
    return np.sqrt(np.sum(x * x, axis=axis, keepdims=True))


def unit(o, eps=1e-6, axis=-1):
    return o / np.maximum(length(o, axis), eps)


def rows_of_values(b, t, low=0.1):
    """Rows of lengths from `low` to 10, in both directions of every axis."""
    rng = np.random.default_rng(b * 100 + t)
    o = unit(rng.normal(size=(b, t, 2, 3)))
    return o * np.exp(rng.uniform(np.log(low), np.log(10), size=(b, t, 2, 1)))


@pytest.mark.parametrize("eps", [0, 1e-6])
@pytest.mark.parametrize("height", [1e-100, 1e-3, 1e100])
def test_rows_are_of_length_one_and_keep_their_direction(eps, height):
    o = height * rows_of_values(2, 5)
    if height < eps:
        assert_close(pa.UnitRows(eps=eps)(o), o / eps)
        return
    y = pa.UnitRows(eps=eps)(o)
    assert_close(length(y), 1.0)
    assert_close(y * length(o), o)


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("eps", [0, 1e-6])
def test_zero_rows_stay_zero_with_a_finite_gradient(eps, detach, axis):
    o, dy = rows_of_values(2, 6), np.random.default_rng(0).normal(size=(2, 6, 2, 3))
    o[:, 2] = 0
    o[..., 1] = 0
    y, pullback = pa.UnitRows(eps=eps, detach=detach, axis=axis).vjp(o)
    assert np.all(y[o == 0] == 0)
    assert_close(y, unit(o, 1e-6, axis=-1 if axis == "token" else 1))
    gradient = pullback(dy)["o"]
    assert np.all(np.isfinite(gradient))
    if eps:
        zero = (length(o, -1 if axis == "token" else 1) == 0) & np.ones_like(o, dtype=bool)
        assert_close(gradient[zero], dy[zero] / eps)


@pytest.mark.parametrize(("dtype", "eps"), [("float32", 1e-45), ("float64", 5e-324)])
def test_an_eps_whose_reciprocal_is_infinite_counts_as_0(dtype, eps):
    o = np.asarray([[3.0, 4.0], [0.0, 0.0]], dtype).reshape(1, 2, 1, 2)
    y, pullback = pa.UnitRows(eps=eps).vjp(o)
    np.testing.assert_array_equal(y[0, :, 0], np.asarray([[0.6, 0.8], [0.0, 0.0]], dtype))
    np.testing.assert_array_equal(pullback(np.ones_like(o))["o"][0, 1, 0], [1.0, 1.0])


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("eps", [0, 1e-6])
def test_zero_values_give_zero_output_and_a_finite_gradient(eps, detach):
    p = Problem(s=6, n=2, group=2)
    v = p.v.copy()
    v[:, :3] = 0  # The values that the first three rows attend to.
    layer = pa.RowNormalized(eps=eps, detach=detach)
    out, pullback = layer.vjp(p.q, p.k, v)
    assert np.all(out[:, :3] == 0)
    assert_close(length(out[:, 3:]), 1.0)
    gradients = pullback(p.like_output())
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients.values())


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("value", [2e38, 1e-30])
def test_rows_of_any_size_are_normalised_to_length_one(axis, value):
    o = np.full((1, 4, 1, 4), value, dtype=np.float32)
    out = pa.UnitRows(eps=0, axis=axis)(o)
    np.testing.assert_allclose(out, 0.5, rtol=1e-6)


def test_a_packed_segment_of_huge_rows_does_not_affect_its_neighbour():
    o = np.ones((1, 4, 1, 2), dtype=np.float32)
    o[:, 2:] = 1e25
    out = pa.UnitRows(axis="channel")(o, segment_ids=np.asarray([[0, 0, 1, 1]]))
    np.testing.assert_allclose(out, 0.5**0.5, rtol=1e-6)
