"""Values that need care, bits that may not change, and strides, by simulated CUDA kernels."""

import numpy as np
import pytest

import precondattn as pa
from precondattn.kernel_backend.precise import VARIABLE
from precondattn_cupy.softmax import laser
from tests.backends.cupy.simulated import ORDERS, check, kernels_for, run
from tests.backends.kernel_problems import (
    DTYPES,
    error,
    frame_of,
    later,
    leaf_of,
    problem,
    require_same_beside_nan,
    row,
    truth_of,
    truth_of_row,
    wide,
)
from tests.kernel_tools.toolchain import needs_simulator

pytestmark = needs_simulator
LATER = pytest.mark.thorough
OPEN = "laser(softmax[causal=false])"
OTHERS = (("float32", 1e-5), ("float16", 4e-5))
FULL = {"d": 16, "e": 16}


def changed(made, **inputs):
    """The truth of a row, whose inputs have been changed: functions of them by name."""
    x, cotangent = problem(made.leaf, made.t, **made.given)
    for name, function in inputs.items():
        if name == "cotangent":
            cotangent = function(cotangent)
        else:
            x[name] = function(x[name]) * np.ones_like(x[name])
    b, s = next(a.shape[:2] for name, a in x.items() if name != "q")
    frame = frame_of(made.t, s, b, **made.masks)
    return truth_of(made.leaf, x, cotangent, frame, made.dtype, made.how.get("filler", np.nan))


def is_close(found):
    return found["residuals"][3].astype(bool).tolist()


def channel_0(size):
    def function(array):
        rows = np.zeros_like(array)
        rows[..., 0] = size
        return rows

    return function


def opposing(apart, **how):
    """The key with the largest score has the smallest value: e^s and e^v vanish in turn."""
    height = apart * np.linspace(-0.5, 0.5, 17)
    of_keys = {"k": channel_0(height[:, None]), "q": channel_0(4)}
    return of_keys | {"v": lambda v: v - height[:, None, None]}


@pytest.mark.parametrize(
    ("made", "changes", "close"),
    [
        *(
            (made.values[0], {"v": lambda v: 60 * (v - v.min()) / np.ptp(v) - 500}, [[True]])
            for made in (
                # Values that differ much dominate attention: terms of the gradient cancel.
                row("near the limit", "laser", 33, **FULL, how={"gradient_bound": 2e-4}),
            )
        ),
        *(
            (row("", leaf, 17, h=1, how={"gradient_bound": 1e-3}).values[0], opposing(apart), close)
            for leaf in ("laser", OPEN)
            for apart, close in ((50.0, [[True]]), (130.0, [[False]]))
        ),
        (
            row("", "laser", 17, masks={"lengths": (16,)}, how={"filler": 1e4}).values[0],
            {},
            [[True]],
        ),
    ],
)
@LATER
def test_laser_of_values_at_the_limit_of_close_heads(made, changes, close):
    """A padded value does not count for the spread of a head."""
    assert is_close(check(made, changed(made, **changes))) == close


@LATER
def test_the_spread_of_many_tokens(monkeypatch):
    monkeypatch.setattr(laser, "SEGMENT", 8)
    made = row("", "laser", 33, **FULL).values[0]
    assert is_close(check(made)) == [[True]]
    far = changed(made, v=lambda v: v - 90 * (np.arange(33) == 20)[:, None, None])
    assert is_close(check(made._replace(how={"gradient_bound": 1e-3}), far)) == [[False]]


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [("bfloat16", 2e-4), *(pytest.param(*each, marks=LATER) for each in OTHERS)],
)
def test_equal_keys_in_a_precise_kernel(monkeypatch, dtype, bound):
    """Only the sums of the rows of dS remain in the gradient of a query."""
    monkeypatch.setenv(VARIABLE, "1")
    made = row("", "softmax", 33, dtype, **FULL).values[0]
    truth = changed(made, k=lambda k: 0.02 * k + 1)
    found = run(kernels_for(made.leaf), made.leaf, truth)[2]
    assert error(found["q"], truth.gradients["q"], least=1) < bound
    # Sums that cancel give a small result, however large the keys are.
    found = check(made, changed(made, k=lambda k: 16 * k[:, :1]))
    assert np.abs(wide(found["q"])).max() < 5e-4
    check(made, changed(made, k=lambda k: 0 * k))


BITS = (
    row("", "softmax", 33, h=4, n=2),
    *later(
        row("", "laser", 33, h=4, n=2),
        row("", "lucid_solve[beta=true]", 50, n=2, keys="clustered"),
        row("", "gated_delta", 9, h=4, n=2),
        row("", "unit_rows", 9, h=2),
    ),
)


@pytest.mark.parametrize("made", BITS)
def test_the_order_of_blocks_and_the_strides_of_inputs_change_no_bit(made):
    truth, kernels = truth_of_row(made), kernels_for(made.leaf)
    odd = {n: np.repeat(a, 2, axis=-1)[..., ::2] for n, a in truth.x.items() if a.ndim == 4}
    strided = {name: np.asfortranarray(a) for name, a in truth.x.items()}
    others = (odd | {n: a for n, a in truth.x.items() if a.ndim < 4}, strided)
    given = [(truth, order) for order in ORDERS] + [(truth._replace(x=x), None) for x in others]
    results = []
    for each, order in given:
        out, residuals, gradients = run(kernels, made.leaf, each, order=order)
        results.append((out, *residuals, *gradients.values()))
    for result in results[1:]:
        for one, other in zip(results[0], result, strict=True):
            np.testing.assert_array_equal(one, other)


@LATER
def test_lucid_multiplies_no_tiles_of_other_segments():
    """Entries of Φ between segments are 0, but multiplying them by NaN would give NaN."""
    lengths = (32, 64, 16)
    ids = np.repeat(np.arange(3), lengths)[None]
    made = row("", "lucid_solve[beta=true]", sum(lengths), n=2, masks={"ids": ids}).values[0]
    require_same_beside_nan(kernels_for(made.leaf), made, ids, run)


@LATER
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_channel_of_lucid_is_as_accurate_as_alone(dtype):
    """The largest float16 is 65504."""
    made = row("", "lucid_solve", 34, dtype, n=2, keys="clustered", values="channels").values[0]
    truth = truth_of_row(made)
    y = run(kernels_for(made.leaf), made.leaf, truth)[0]
    for channel in range(truth.out.shape[3]):
        expected = truth.out[..., channel]
        size = np.abs(expected).max()
        assert np.abs(wide(y[..., channel]) - expected).max() < size * (
            2e-5 if dtype == "float32" else 2e-2
        )


def from_token_3(size):
    return lambda d: d * np.where(np.arange(34) < 3, 4000, size)[:, None, None]


@LATER
@pytest.mark.parametrize(
    ("dtype", "values", "cotangent", "name", "tokens", "bound"),
    [
        # dv of a token depends on its own cotangent and on later ones, which are small here.
        ("float16", 1, from_token_3(0.002), "v", slice(3, None), 5e-3),
        # Products of dv and y overflow float16; the gradient of the keys does not.
        ("float16", 60, lambda d: 100 * d, "k", slice(None), 1e-2),
        # Rows that grow from tile to tile, and rows of 1e-20.
        ("bfloat16", 1e3, lambda d: d * np.logspace(-20, 20, 34)[:, None, None], "k", ..., 2e-2),
    ],
)
def test_gradients_of_lucid_of_any_size(dtype, values, cotangent, name, tokens, bound):
    made = row("", "lucid_solve", 34, dtype, keys="clustered", apart=values).values[0]
    truth = changed(made, cotangent=cotangent)
    found = run(kernels_for(made.leaf), made.leaf, truth)[2][name]
    expected = truth.gradients[name][:, tokens]
    assert np.abs(wide(found)[:, tokens] - expected).max() < bound * np.abs(expected).max()


@pytest.mark.parametrize("detach", [True, False])
def test_rows_about_as_long_as_eps(detach):
    rng = np.random.default_rng(0)
    o, d_y = rng.normal(size=(2, 1, 24, 2, 40)) / 6
    o *= np.linspace(0.3, 2.0, 24)[:, None, None]
    o[:, 12:] *= np.arange(40) == 31  # One entry, that of a warp's last thread.
    leaf = pa.UnitRows(detach=detach, eps=1.0 / 8)
    for size in (1e-38, 1e-20, 1e20, 3e38):  # Squares overflow or vanish.
        long = pa.UnitRows(eps=0)((o * size / np.abs(o).max()).astype(np.float32), backend="cupy")
        np.testing.assert_allclose(np.linalg.norm(long, axis=-1), 1, rtol=1e-5)
    y, pullback = leaf.vjp(o.astype(np.float32), backend="cupy")
    result = pullback(d_y.astype(np.float32))["o"]
    expected, pullback = leaf.vjp(o, backend="reference")
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result, pullback(d_y)["o"], rtol=1e-4, atol=1e-5)


@LATER
@pytest.mark.parametrize(
    ("dtype", "eps", "detach"), [("float32", 1e-45, True), ("float64", 5e-324, False)]
)
def test_an_eps_whose_reciprocal_is_infinite_counts_as_zero(detach, dtype, eps):
    o = problem(leaf_of("unit_rows"), 4, b=2)[0]["o"].astype(DTYPES[dtype])
    results = []
    for least in (eps, 0.0):
        y, pullback = pa.UnitRows(detach=detach, eps=least).vjp(o, backend="cupy")
        results.append((y, pullback(np.ones_like(o))["o"]))
    assert np.isfinite(results[0][1]).all()
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
