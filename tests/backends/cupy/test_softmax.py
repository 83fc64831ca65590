"""Softmax attention's CUDA kernels against the definition, in the simulator."""

import numpy as np
import pytest

import precondattn as pa
from precondattn.backend import Request
from precondattn.kernel_backend.precise import VARIABLE
from precondattn_cupy.configurations import Configuration
from precondattn_cupy.softmax import leaf as softmax
from tests.backends.cupy.attention import (
    TILES,
    check,
    expected,
    problem,
    run_kernels,
    unwritten_is_nan,
    with_nan,
)
from tests.backends.cupy.simulated import DTYPES, ORDERS, error
from tests.kernel_tools.toolchain import needs_simulator

__all__ = ["unwritten_is_nan"]
pytestmark = pytest.mark.usefixtures("unwritten_is_nan")

CAUSAL = (pa.Softmax(), pa.Softmax(causal=False))


@pytest.mark.thorough(but=("33-float32-leaf1", "33-bfloat16-leaf1"))
@needs_simulator
@pytest.mark.parametrize("leaf", CAUSAL)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("t", [1, 15, 16, 17, 33])
def test_output_and_gradients_of_every_length_and_dtype(t, dtype, leaf):
    check(*problem(t, b=1, dtype=dtype), leaf=leaf)


@needs_simulator
@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_blocks_and_threads_gives_the_definition(order):
    check(*problem(33, h=4, n=2), order=order)


@pytest.mark.thorough
@needs_simulator
@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 2e-4), ("float16", 4e-5)])
def test_equal_keys_in_a_precise_kernel(monkeypatch, dtype, bound):
    """Only the sums of the rows of dS remain in the gradient of a query."""
    monkeypatch.setenv(VARIABLE, "1")
    x, d_out = problem(33, b=1, dtype=dtype)
    x["k"] = (0.02 * x["k"].astype(np.float32) + 1).astype(DTYPES[dtype])
    wanted = expected(x, d_out)["q"]
    assert error(run_kernels(x, d_out)["q"], wanted) < bound


@pytest.mark.thorough(but=("12-5", "5-12"))
@needs_simulator
@pytest.mark.parametrize(("d", "e"), [(5, 12), (12, 5), (1, 1), (20, 24)])
def test_any_width(d, e):
    check(*problem(19, d=d, e=e))


@needs_simulator
@pytest.mark.parametrize("leaf", CAUSAL)
@pytest.mark.parametrize(("t", "s"), [(1, 40), (17, 40)])
def test_fewer_queries_than_keys_are_the_last_ones(t, s, leaf):
    check(*problem(t, s, b=1, h=2, n=2), leaf=leaf)


@needs_simulator
def test_more_queries_than_keys():
    check(*problem(40, 17, b=1), leaf=pa.Softmax(causal=False))


@needs_simulator
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 5, 16, 17, 100])
def test_windows_give_the_definition(window, causal):
    check(*problem(20, 40, b=1), leaf=pa.Softmax(window=window, causal=causal, scale=0.7))


@needs_simulator
@pytest.mark.parametrize("leaf", CAUSAL)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_may_contain_nan(dtype, leaf):
    x, d_out = problem(33, b=3, h=1, dtype=dtype)
    lengths = np.array([0, 20, 33])
    masked = np.arange(33) >= lengths[:, None]
    x = {name: with_nan(a, masked) for name, a in x.items()}
    ours = check(x, with_nan(d_out, masked), leaf=leaf, lengths=lengths)
    assert all((ours[name][masked] == 0).all() for name in ("out", *x))


@needs_simulator
def test_a_nan_in_a_key_reaches_its_own_output_and_later_ones():
    x, d_out = problem(20, h=1)
    x["k"][:, 7, 0, 3] = np.nan
    out = run_kernels(x, d_out)["out"]
    assert np.isnan(out[:, 7:]).all()
    assert np.isfinite(out[:, :7]).all()


@needs_simulator
@pytest.mark.parametrize("leaf", CAUSAL)
def test_masked_keys_may_contain_nan_and_queries_may_have_no_visible_key(leaf):
    x, d_out = problem(33, h=1)
    key_mask = np.arange(33) % 5 > 1  # A causal query before the third has no visible key.
    key_mask = key_mask[None] & np.array([[True], [False]])
    x |= {name: with_nan(x[name], ~key_mask) for name in ("k", "v")}
    ours = check(x, d_out, leaf=leaf, key_mask=key_mask)
    assert (ours["out"][1] == 0).all()
    assert (ours["q"][1] == 0).all()


@needs_simulator
@pytest.mark.parametrize("leaf", [*CAUSAL, pa.Softmax(window=7)])
def test_queries_attend_to_their_own_segment_only(leaf):
    ids = np.array([[2**40] * 10 + [1] * 8 + [2**40 + 2**32] * 25, [7] * 43])
    check(*problem(43, h=1), leaf=leaf, segment_ids=ids)


@needs_simulator
def test_segments_of_fewer_queries_than_keys():
    ids = np.arange(51)[None] // np.array([[12], [17]])
    check(*problem(20, 51, h=2), segment_ids=ids, lengths=np.array([48, 51]))


@pytest.mark.thorough(but=("float16", "bfloat16"))
@needs_simulator
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_equal_or_zero_keys_in_a_precise_kernel(monkeypatch, dtype):
    monkeypatch.setenv(VARIABLE, "1")
    x, d_out = problem(33, b=1, dtype=dtype)
    x["k"][:] = x["k"][:, :1]
    x["k"] += DTYPES[dtype](0.1) * problem(33, b=1, dtype=dtype)[0]["k"]
    check(x, d_out)
    x["k"][:] = DTYPES[dtype](16) * x["k"][:, :1]
    # Sums that cancel give a small result, however large the keys are.
    assert np.max(np.abs(check(x, d_out)["q"])) < 5e-4
    x["k"] *= 0
    check(x, d_out)


@needs_simulator
@pytest.mark.parametrize("size", [1e-4, 1e3])
def test_logits_of_any_size(size):
    x, d_out = problem(33, b=1)
    x["q"] *= np.float32(size)
    # Float32 rounds logits of that size to 1e-4, and so their exponentials.
    check(x, d_out, bound=1e-3 if size > 1 else 1e-5)


@pytest.mark.thorough
@needs_simulator
def test_shipped_tiles_compute_the_same():
    check(*problem(70, b=1, h=1, dtype="bfloat16"), tiles={})


@pytest.mark.thorough
@needs_simulator
def test_tiles_of_queries_and_keys_may_differ():
    high, wide = Configuration(32, 16), Configuration(16, 32)
    for leaf in (*CAUSAL, pa.Softmax(window=40)):
        tiles = dict(zip(TILES[:3], (high, wide, high), strict=True))
        check(*problem(70, b=1, h=1), tiles=tiles, leaf=leaf)


@pytest.mark.thorough
@needs_simulator
def test_channels_in_several_parts_give_the_definition():
    check(*problem(18, b=1, h=2, d=200, e=300))


@needs_simulator
def test_every_run_gives_the_same_bits():
    x, d_out = problem(33, h=4, n=2)
    first, second = (run_kernels(x, d_out, order=order) for order in ("reverse", 3))
    for name in ("out", *x):
        np.testing.assert_array_equal(first[name], second[name])


@needs_simulator
def test_inputs_of_any_strides():
    rng = np.random.default_rng(0)
    x = {
        "q": rng.standard_normal((2, 4, 16, 17)).transpose(0, 3, 1, 2),
        "k": rng.standard_normal((2, 2, 20, 32))[:, :, 3:, ::2].transpose(0, 2, 1, 3),
        "v": rng.standard_normal((17, 2, 2, 16)).transpose(1, 0, 2, 3)[:, ::-1],
    }
    x = {name: array.astype(np.float32, order="K") for name, array in x.items()}
    check(x, np.broadcast_to(np.float32(1.5), (2, 17, 4, 16)))


def refusal(leaf, *, verb="vjp", dtype="bfloat16", t=8, h=2, d=64, e=64):
    shapes = (("q", (1, t, h, d)), ("k", (1, 8, 1, d)), ("v", (1, 8, 1, e)))
    return softmax.SoftmaxKernels().refuses(
        leaf, Request(verb, "numpy", "cpu", dtype, shapes, frozenset())
    )


def test_supported_calls_are_accepted():
    for size in ({}, {"d": 1, "e": 3}, {"d": 256, "e": 512}, {"verb": "forward"}):
        for leaf in (*CAUSAL, pa.Softmax(window=4), pa.Softmax(scale=2.0)):
            assert refusal(leaf, **size) is None


@pytest.mark.parametrize(
    ("leaf", "changes", "reason"),
    [
        (pa.Softmax(bias=True), {}, "a bias"),
        (pa.Softmax(forget="scaled"), {}, "a forget gate"),
        (pa.Softmax(), {"d": 257}, "keys of at most 256 channels; found 257"),
        (pa.Softmax(), {"e": 513}, "values of at most 512 channels; found 513"),
        (pa.Softmax(), {"t": 0}, "no empty arrays"),
        (pa.Softmax(), {"h": 65536}, "at most 65535 sequences"),
        (pa.Softmax(), {"t": 2**30}, "fewer than"),
    ],
)
def test_unsupported_calls_are_declined_with_the_reason(leaf, changes, reason):
    assert reason in refusal(leaf, **changes)
