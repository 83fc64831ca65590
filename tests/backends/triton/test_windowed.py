"""Windowed attention's Triton kernels against the definition, in the interpreter."""

import pytest

pytest.importorskip("triton")

import numpy as np
import torch

import precondattn as pa
from precondattn.backend import ArraySpec, Request
from precondattn.frame import full_frame
from precondattn.kernel_backend.windows import grid_of
from precondattn_conformance.tolerance import error
from precondattn_triton import Triton
from precondattn_triton.configurations import Configuration
from precondattn_triton.windowed.leaf import WindowedKernels
from tests.backends.triton.tiles import SMALL, tiles_as_given

BOUND = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
SWIN = "windowed[size=3/2,shift=1,grid=5/7,bias=true]"
SMALLER = "windowed[size=2/3,shift=1,grid=3/4,bias=true]"


def problem(expression, t, s=None, *, b=1, h=1, n=1, d=16, e=8, dtype=torch.float32):
    """Inputs, and a cotangent."""
    torch.manual_seed(t)
    sizes = {"b": b, "t": t, "s": s or t, "h": h, "n": n, "d": d, "e": e}
    inputs = pa.parse(expression).inputs
    x = {name: torch.randn(p.shape(sizes)).to(dtype) for name, p in inputs.items()}
    return x, torch.randn(b, t, h, e).to(dtype)


def wide(array):
    return array.double().numpy()


def run_kernels(expression, x, d_out, *, seed=0, tiles=SMALL, **masks):
    """Output and gradients by the kernels."""
    leaf, kernels = pa.parse(expression), WindowedKernels()
    frame = full_frame(x["q"].shape[1], x["k"].shape[1], x["q"], **masks)
    with torch.no_grad(), tiles_as_given(seed, tiles):
        out, residuals = kernels.forward(leaf, x, frame)
        gradients = kernels.backward(leaf, x, frame, out, residuals, d_out)
    specs = {
        n: ArraySpec(tuple(a.shape), str(a.dtype).removeprefix("torch.")) for n, a in x.items()
    }
    shapes = [ArraySpec(tuple(r.shape), str(r.dtype).removeprefix("torch.")) for r in residuals]
    assert shapes == list(kernels.residual_shapes(leaf, specs))
    return out, gradients


def check(expression, x, d_out, *, seed=0, tiles=SMALL, **masks):
    """The kernels agree with the definition in float64, and write to none of the inputs."""
    before = {name: a.clone() for name, a in x.items()}
    out, gradients = run_kernels(expression, x, d_out, seed=seed, tiles=tiles, **masks)
    with pa.use_backend("reference"):
        wide_x = {name: a.double() for name, a in x.items()}
        right, pullback = pa.parse(expression).vjp(**wide_x, **masks)
        expected = pullback(d_out.double())
    bound = BOUND[x["v"].dtype]
    assert out.dtype == x["v"].dtype
    assert error(wide(out), wide(right)) < bound
    for name, gradient in expected.items():
        assert gradients[name].dtype == x[name].dtype
        assert gradients[name].shape == x[name].shape
        assert error(wide(gradients[name]), wide(gradient)) < 2 * bound, name
        torch.testing.assert_close(x[name], before[name], rtol=0, atol=0, equal_nan=True)
    return out, gradients


@pytest.mark.thorough(
    but=(
        "windowed[size=5,shift=2,bias=true]-12-4-2-20-12-dtype1",
        "windowed[size=2/3,shift=0/2,grid=5,bias=true]-23-2-2-16-8-dtype6",
    )
)
@pytest.mark.parametrize(
    ("expression", "t", "h", "n", "d", "e", "dtype"),
    [
        ("windowed[size=4]", 9, 2, 2, 8, 16, torch.float32),
        ("windowed[size=5,shift=2,bias=true]", 12, 4, 2, 20, 12, torch.float32),
        ("windowed[size=20,shift=7,bias=true,scale=0.3]", 33, 1, 1, 8, 8, torch.bfloat16),
        ("windowed[size=2,shift=1,bias=true]", 33, 1, 1, 8, 8, torch.float32),
        (SMALLER, 12, 2, 1, 12, 20, torch.float32),
        (SMALLER, 12, 2, 2, 16, 16, torch.float16),
        ("windowed[size=2/3,shift=0/2,grid=5,bias=true]", 23, 2, 2, 16, 8, torch.bfloat16),
        ("windowed[size=6,shift=3,grid=7/8,bias=true]", 56, 1, 1, 16, 16, torch.float32),
        ("windowed[size=3/1,shift=1/0,grid=6/2,bias=true]", 12, 1, 1, 8, 8, torch.float32),
    ],
)
def test_output_and_gradients_of_windows_of_every_kind(expression, t, h, n, d, e, dtype):
    b = 2 if t < 12 else 1
    check(expression, *problem(expression, t, b=b, h=h, n=n, d=d, e=e, dtype=dtype))


def test_tiles_of_queries_and_keys_may_differ():
    expression = "windowed[size=6,shift=2,grid=7/8,bias=true]"
    high, broad = Configuration(32, 16), Configuration(16, 32)
    tiles = {
        "forward": broad,
        "query_gradient": high,
        "key_gradient": high,
        "table_gradient": broad,
    }
    tiles = {**SMALL, **{f"window_{name}": cut for name, cut in tiles.items()}}
    check(expression, *problem(expression, 56), tiles=tiles)


@pytest.mark.parametrize("t", [1, 17])
def test_fewer_queries_than_keys_are_the_last_ones(t):
    check(SWIN, *problem(SWIN, t, 35, h=2))


def test_padding_may_contain_nan():
    expression = "windowed[size=2/3,shift=1,grid=5,bias=true]"
    x, d_out = problem(expression, 23, b=2, dtype=torch.bfloat16)
    lengths = torch.tensor([0, 13])
    is_masked = torch.arange(23) >= lengths[:, None]
    x |= {name: with_nan(x[name], is_masked) for name in "qkv"}
    out, gradients = check(expression, x, with_nan(d_out, is_masked), lengths=lengths)
    assert (out[is_masked] == 0).all()
    assert all((gradients[name][is_masked] == 0).all() for name in "qkv")


def test_masked_keys_may_contain_nan_and_windows_may_have_no_visible_key():
    x, d_out = problem(SMALLER, 12, b=2)
    key_mask = torch.arange(12)[None] % 4 > 1
    key_mask = key_mask & torch.tensor([[True], [False]])
    x |= {name: with_nan(x[name], ~key_mask) for name in "kv"}
    out, gradients = check(SMALLER, x, d_out, key_mask=key_mask)
    assert (out[1] == 0).all()
    assert (gradients["q"][1] == 0).all()


def test_a_nan_stays_in_its_window():
    x, d_out = problem(SWIN, 35)
    x["k"][:, 16, 0, 3] = torch.nan
    out, _ = run_kernels(SWIN, x, d_out)
    grid = torch.isnan(out[0, :, 0, 0]).reshape(5, 7)
    assert grid[1:4, 1:3].all()
    assert grid.sum() == 6


def test_duplicate_and_zero_keys():
    x, d_out = problem(SWIN, 35)
    x["k"][:, 5:25] = x["k"][:, 5:6]
    x["k"][:, ::3] = 0
    check(SWIN, x, d_out)


def test_inputs_of_any_strides():
    x, _ = problem(SMALLER, 12, b=2, h=2, n=2)
    apart = {
        name: torch.stack((a, a), dim=-1)[..., 0].transpose(0, 1).contiguous().transpose(0, 1)
        for name, a in x.items()
    }
    check(SMALLER, apart, torch.randn(12, 1, 8)[None].expand(2, 12, 2, 8))


def test_any_order_of_programs_gives_the_same_bits():
    x, d_out = problem(SMALLER, 12, b=2, h=2)
    first, second = (run_kernels(SMALLER, x, d_out, seed=seed) for seed in (1, 2))
    assert torch.equal(first[0], second[0])
    for name, gradient in first[1].items():
        assert torch.equal(gradient, second[1][name])


def test_shipped_tiles_compute_the_same():
    for dtype in (torch.float32, torch.bfloat16):
        check(SWIN, *problem(SWIN, 35, dtype=dtype), tiles={})


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


def with_nan(array, is_masked):
    """The array with NaN at masked tokens (b, t)."""
    shape = (*is_masked.shape, *[1] * (array.ndim - 2))
    return array.masked_fill(is_masked.reshape(shape), torch.nan)


def refusal(expression, *, verb="vjp", d=64, e=64, t=35, masks=()):
    (leaf,) = pa.parse(expression).program.leaves
    sizes = {"b": 1, "t": t, "s": t, "h": 2, "n": 1, "d": d, "e": e}
    shapes = tuple((name, p.shape(sizes)) for name, p in leaf.inputs.items())
    return Triton().supports(
        leaf, Request(verb, "torch", "cpu", "bfloat16", shapes, frozenset(masks))
    )


def test_supported_calls_are_accepted():
    for changes in ({}, {"d": 68}, {"d": 256, "e": 512}, {"verb": "forward"}):
        assert refusal(SWIN, **changes).ok
    assert refusal("windowed", masks=("lengths", "key_mask")).ok


@pytest.mark.parametrize(
    ("expression", "changes", "reason"),
    [
        ("laser(windowed)", {}, "LASER"),
        ("windowed[size=1025]", {}, "at most 1024 tokens; found 1025"),
        ("windowed", {"masks": ("segment_ids",)}, "packed sequences"),
        ("windowed", {"d": 264}, "keys of width 256 at most; found 264"),
        ("windowed", {"e": 520}, "values of width 512 at most; found 520"),
        ("windowed", {"t": 0}, "empty"),
    ],
)
def test_calls_without_a_kernel_are_declined_with_the_reason(expression, changes, reason):
    support = refusal(expression, **changes)
    assert not support.ok
    assert reason in support.reason
