"""LASER's CUDA kernels against the definition, in the simulator."""

import numpy as np
import pytest

import precondattn as pa
from precondattn.backend import Request
from precondattn.spec.laser import LOG_MEAN_EXP
from precondattn_cupy.softmax.laser import LaserKernels
from tests.backends.cupy.attention import check, problem, run_kernels, unwritten_is_nan, with_nan
from tests.backends.cupy.simulated import DTYPES, ORDERS
from tests.kernel_tools.toolchain import needs_simulator

__all__ = ["unwritten_is_nan"]
# Thorough: the first test of each kernel compiles it for the simulator, which takes seconds.
pytestmark = [pytest.mark.usefixtures("unwritten_is_nan"), pytest.mark.thorough]

FLOAT16 = pytest.param("float16", marks=pytest.mark.slow)
"""Slow: its kernels take 20 seconds to build; `test_attention_by_tensor_cores` runs them too."""
HALF = (FLOAT16, "bfloat16")
TYPES = ("float32", *HALF)


def laser(**options):
    return pa.Softmax(read=LOG_MEAN_EXP, **options)


CAUSAL = (laser(), laser(causal=False))


def is_close(ours):
    return ours["residuals"][3].astype(bool).tolist()


# ------------------------------------------------------------------------------- close heads


@pytest.mark.thorough(but=("33-float32-leaf1", "33-bfloat16-leaf1"))
@needs_simulator
@pytest.mark.parametrize("leaf", CAUSAL)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("t", [1, 15, 16, 17, 33])
def test_output_and_gradients_of_every_length_and_dtype(t, dtype, leaf):
    ours = check(*problem(t, b=1, dtype=dtype), leaf=leaf, gradient_bound=GRADIENTS[dtype])
    assert is_close(ours) == [[True]]


GRADIENTS = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 4e-2}


@needs_simulator
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_any_order_of_blocks_and_threads_gives_the_definition(spread, order):
    check(*problem(19, h=4, n=2, spread=spread), leaf=laser(), order=order, gradient_bound=1e-4)


@needs_simulator
@pytest.mark.parametrize("spread", [1.0, 100.0])
@pytest.mark.parametrize("leaf", [*CAUSAL, laser(window=7)])
@pytest.mark.parametrize("t", [1, 17])
def test_fewer_queries_than_keys_are_the_last_ones(t, leaf, spread):
    check(*problem(t, 40, b=1, d=12, e=5, spread=spread), leaf=leaf, gradient_bound=1e-4)


@needs_simulator
@pytest.mark.parametrize("leaf", CAUSAL)
@pytest.mark.parametrize("spread", [1.0, 100.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_may_contain_nan(dtype, spread, leaf):
    x, d_out = problem(33, b=3, h=1, dtype=dtype, spread=spread)
    lengths = np.array([0, 20, 33])
    masked = np.arange(33) >= lengths[:, None]
    x = {name: with_nan(a, masked) for name, a in x.items()}
    ours = check(
        x, with_nan(d_out, masked), leaf=leaf, lengths=lengths,
        gradient_bound=1e-4 if dtype == "float32" else 4e-2,
    )  # fmt: skip
    assert all((ours[name][masked] == 0).all() for name in ("out", *x))
    assert is_close(ours) == [[True], [spread == 1], [spread == 1]]


@needs_simulator
@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_a_nan_in_a_key_reaches_its_own_output_and_later_ones(spread):
    x, d_out = problem(20, h=1, spread=spread)
    x["k"][:, 7, 0, 3] = np.nan
    out = run_kernels(x, d_out, leaf=laser())["out"]
    assert np.isnan(out[:, 7:]).all()
    assert np.isfinite(out[:, :7]).all()


@needs_simulator
@pytest.mark.parametrize("leaf", CAUSAL)
@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_segments_and_masked_keys(spread, leaf):
    x, d_out = problem(43, h=2, spread=spread)
    ids = np.array([[2**40] * 10 + [1] * 8 + [2**40 + 2**32] * 25, [7] * 43])
    key_mask = np.arange(43) % 5 > 1
    key_mask = key_mask[None] & np.array([[True], [False]])
    x |= {name: with_nan(x[name], ~key_mask) for name in ("k", "v")}
    ours = check(
        x, d_out, leaf=leaf, segment_ids=ids, key_mask=key_mask, gradient_bound=1e-4
    )  # fmt: skip
    assert (ours["out"][1] == 0).all()
    assert all((ours[name][1] == 0).all() for name in x)


@needs_simulator
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("height", [0.0, -3.0, 1e4])
def test_constant_values_give_that_constant(dtype, height):
    x, d_out = problem(33, b=1, dtype=dtype)
    x["v"] = np.full_like(x["v"], height)
    ours = run_kernels(x, d_out, leaf=laser())
    assert (ours["out"] == x["v"][:, :, :1]).all()
    assert (ours["q"] == 0).all()


@needs_simulator
@pytest.mark.parametrize("dtype", TYPES)
def test_values_near_the_limit_of_close_heads(dtype):
    x, d_out = problem(33, b=1, dtype=dtype)
    lift = 60 * np.random.default_rng(0).random(x["v"].shape) - 500
    x["v"] = lift.astype(DTYPES[dtype])
    # Values that differ much dominate attention: terms of the gradient cancel.
    ours = check(x, d_out, leaf=laser(), gradient_bound=10 * GRADIENTS[dtype])
    assert is_close(ours) == [[True]] or dtype == "bfloat16"


@needs_simulator
@pytest.mark.parametrize("dtype", HALF)
def test_small_values_have_small_errors(dtype):
    """e^v is close to 1, where the spacing of half-precision numbers is as large as the values."""
    x, d_out = problem(33, b=1, dtype=dtype, spread=1e-2)
    ours = check(x, d_out, leaf=laser())
    exact = check({name: a.astype(np.float32) for name, a in x.items()}, d_out, leaf=laser())
    assert np.max(np.abs(ours["out"] - exact["out"])) < 2e-4


# ------------------------------------------------------------------------------- exact heads


@needs_simulator
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("leaf", CAUSAL)
def test_values_far_apart(dtype, leaf):
    x, d_out = problem(33, b=1, dtype=dtype, spread=100.0)
    ours = check(x, d_out, leaf=leaf, gradient_bound=10 * GRADIENTS[dtype])
    assert is_close(ours) == [[False]]


@pytest.mark.thorough
@needs_simulator
def test_values_far_apart_with_several_groups_of_channels():
    check(*problem(17, 20, b=1, h=2, e=72, spread=100.0), leaf=laser(), gradient_bound=1e-4)


@needs_simulator
def test_close_and_far_heads_in_one_call():
    x, d_out = problem(17, h=4, n=2)
    x["v"][:, :, 1] *= 100
    x["v"][1, :, 1] /= 100
    ours = check(x, d_out, leaf=laser(), gradient_bound=1e-4)
    assert is_close(ours) == [[True, False], [True, True]]


@needs_simulator
def test_a_padded_value_does_not_count_for_the_spread_of_a_head():
    x, d_out = problem(17, b=1)
    x["v"][:, 16] = 1e4
    assert is_close(check(x, d_out, leaf=laser(), lengths=np.array([16]))) == [[True]]
    assert is_close(run_kernels(x, d_out, leaf=laser())) == [[False]]


@needs_simulator
@pytest.mark.parametrize("apart", [50.0, 130.0])
@pytest.mark.parametrize("leaf", CAUSAL)
def test_values_that_oppose_the_scores(apart, leaf):
    """The key with the largest score has the smallest value: e^s and e^v vanish in turn."""
    x, d_out = problem(17, b=1, h=1)
    height = np.linspace(-0.5, 0.5, 17, dtype=np.float32) * np.float32(apart)
    x["q"], x["k"] = np.zeros_like(x["q"]), np.zeros_like(x["k"])
    x["q"][..., 0], x["k"][0, :, 0, 0] = 4, height
    x["v"] = x["v"] - height[None, :, None, None]
    ours = check(x, d_out, leaf=leaf, gradient_bound=1e-3)
    assert is_close(ours) == [[apart < 60]]


@needs_simulator
def test_outputs_do_not_depend_on_later_values():
    x, d_out = problem(17, b=1, h=1, spread=100.0)
    later = {name: a.copy() for name, a in x.items()}
    later["v"][:, 12:] += 3e4
    later["k"][:, 12:] *= 7
    first, second = (run_kernels(given, d_out, leaf=laser())["out"][:, :12] for given in (x, later))
    np.testing.assert_array_equal(first, second)


@needs_simulator
def test_the_spread_of_many_tokens(monkeypatch):
    monkeypatch.setattr("precondattn_cupy.softmax.laser.SEGMENT", 8)
    x, d_out = problem(33, b=1)
    check(x, d_out, leaf=laser())
    x["v"][:, 20] -= 90
    assert is_close(run_kernels(x, d_out, leaf=laser())) == [[False]]


# --------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("leaf", "dtype", "e", "reason"),
    [
        (laser(bias=True), "float32", 64, "a bias"),
        (laser(forget="scaled"), "float32", 64, "a forget gate"),
        (laser(), "float32", 513, "at most 512 channels; found 513"),
        (laser(), "float16", 129, "at most 128 channels; found 129"),
    ],
)
def test_unsupported_calls_are_declined_with_the_reason(leaf, dtype, e, reason):
    shapes = (("q", (1, 8, 2, 64)), ("k", (1, 8, 1, 64)), ("v", (1, 8, 1, e)))
    request = Request("vjp", "numpy", "cpu", dtype, shapes, frozenset())
    assert reason in LaserKernels().refuses(leaf, request)


@needs_simulator
@pytest.mark.parametrize("apart", [0.0, 100.0])
def test_outputs_of_0_beside_large_values(apart):
    """Padded queries have an output of 0, far from values that differ between segments."""
    x, d_out = problem(33)
    segment = np.arange(33) // 7
    x["v"] = (x["v"] + (100 + apart * (segment % 2))[:, None, None]).astype(np.float32)
    masks = {"lengths": np.array([33, 9]), "segment_ids": np.stack([segment, segment])}
    check(x, d_out, leaf=laser(), gradient_bound=1e-4, **masks)
