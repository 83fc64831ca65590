"""The Pallas kernels of windowed attention against the definition, interpreted."""

import numpy as np
import pytest

pytest.importorskip("jax")

import precondattn as pa
from precondattn.backend import Request
from precondattn.kernel_backend.windows import grid_of
from precondattn_pallas.configurations import Configuration
from precondattn_pallas.windowed.leaf import WindowedKernels
from tests.backends.pallas.tiles import BOUNDS, check, frame_of

KERNELS = WindowedKernels(interpret=True)
SWIN = "windowed[size=3/2,shift=1,grid=5/7,bias=true]"


def problem(expression, t, s=None, *, b=1, h=2, n=2, d=16, e=8):
    """Inputs in float64, and a cotangent."""
    rng = np.random.default_rng(t)
    sizes = {"b": b, "t": t, "s": s or t, "h": h, "n": n, "d": d, "e": e}
    inputs = pa.parse(expression).inputs
    x = {name: rng.normal(size=pattern.shape(sizes)) for name, pattern in inputs.items()}
    return x, rng.normal(size=(b, t, h, e))


def run(expression, x, cotangent, dtype="float32", *, masks=None, **tiles):
    frame = frame_of(x["q"].shape[1], x["k"].shape[1], x["q"].shape[0], **(masks or {}))
    check(KERNELS, pa.parse(expression), x, cotangent, frame, dtype, BOUNDS[dtype], **tiles)


@pytest.mark.thorough(
    but=(
        "windowed[size=20,shift=7,bias=true,scale=0.3]-33-sizes2-bfloat16",
        "windowed[size=2,shift=1,bias=true]-33-sizes3-float32",
    )
)
@pytest.mark.parametrize(
    ("expression", "t", "sizes", "dtype"),
    [
        ("windowed[size=4]", 9, {"b": 2}, "float32"),
        ("windowed[size=5,shift=2,bias=true]", 12, {"h": 4, "n": 2, "d": 20, "e": 12}, "float32"),
        ("windowed[size=20,shift=7,bias=true,scale=0.3]", 33, {}, "bfloat16"),
        ("windowed[size=2,shift=1,bias=true]", 33, {}, "float32"),  # Two groups of windows.
        ("windowed[size=2/3,shift=1,grid=3/4,bias=true]", 12, {"n": 1, "e": 20}, "float16"),
        ("windowed[size=2/3,shift=0/2,grid=5,bias=true]", 23, {"b": 2}, "float32"),
        ("windowed[size=6,shift=3,grid=7/8,bias=true]", 56, {"h": 1, "n": 1}, "float32"),
    ],
)
def test_output_and_gradients_of_windows_of_every_kind(expression, t, sizes, dtype):
    run(expression, *problem(expression, t, **sizes), dtype)


def test_tiles_of_queries_and_keys_may_differ():
    expression = "windowed[size=6,shift=2,grid=7/8,bias=true]"
    high, broad = Configuration(32, 16), Configuration(16, 32)
    tiles = {"forward": high, "query_gradient": broad, "key_gradient": high, "table_gradient": high}
    tiles = {f"window_{name}": tile for name, tile in tiles.items()}
    run(expression, *problem(expression, 56), **tiles)


@pytest.mark.parametrize("t", [1, 17])
def test_fewer_queries_than_keys_are_the_last_ones(t):
    run(SWIN, *problem(SWIN, t, 35))


def test_padding_may_contain_nan_and_windows_may_have_no_visible_key():
    expression = "windowed[size=2/3,shift=1,grid=5,bias=true]"
    run(expression, *problem(expression, 23, b=2), "bfloat16", masks={"lengths": (0, 13)})
    key_mask = (np.arange(23) % 3 > 0) & (np.arange(23) > 9) & np.ones((2, 1), bool)
    run(expression, *problem(expression, 23, b=2), masks={"key_mask": key_mask})


def test_one_window_of_many_tiles_is_softmax():
    expression = "windowed[size=70]"
    x, cotangent = problem(expression, 70, h=1, n=1)
    run(expression, x, cotangent)


def request(dtype="float32", masks=(), **shapes):
    sizes = {"q": (1, 35, 2, 16), "k": (1, 35, 2, 16), "v": (1, 35, 2, 16)} | shapes
    return Request("call", "jax", "cuda", dtype, tuple(sizes.items()), frozenset(masks))


@pytest.mark.parametrize(
    ("expression", "given", "reason"),
    [
        ("laser(windowed)", {}, "LASER's read"),
        ("windowed", {"masks": ["segment_ids"]}, "packed sequences"),
        ("windowed", {"q": (1, 0, 2, 16)}, "no empty arrays"),
        ("windowed[size=1025]", {}, "at most 1024 tokens; found 1025"),
        ("windowed", {"v": (1, 35, 2, 129)}, "values whose width is at most 128; found 129"),
        ("windowed", {"q": (1, 35, 65536, 16)}, "at most 65535 sequences"),
    ],
)
def test_a_refusal_says_what_is_supported(expression, given, reason):
    leaf = pa.parse(expression).program.leaves[-1]
    windowed = next(p for p in pa.parse(expression).program.leaves if isinstance(p, pa.Windowed))
    assert reason in KERNELS.refuses(windowed, request(**given)), leaf


@pytest.mark.parametrize("shift", range(4))
def test_windows_cover_each_token_once(shift):
    leaf = pa.Windowed(size=(4, 3), shift=(shift, shift % 3), grid=7)
    grid, size = grid_of(leaf.windows, 61)
    token = np.full((grid.windows, size.slots), -1)
    for window, slot in np.ndindex(token.shape):
        row = grid.first_row + window // grid.across * size.rows + slot // size.columns
        column = grid.first_column + window % grid.across * size.columns + slot % size.columns
        if row >= 0 and 0 <= column < grid.columns and row * grid.columns + column < 61:
            token[window, slot] = row * grid.columns + column
    assert sorted(token[token >= 0]) == list(range(61))
