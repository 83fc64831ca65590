"""LASER's Triton kernels against the definition, in the interpreter."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn.backend import ArraySpec, Request
from precondattn.frame import full_frame
from precondattn_conformance.tolerance import error
from precondattn_triton.configurations import Configuration
from precondattn_triton.softmax.channel_parts import ChannelParts
from precondattn_triton.softmax.laser import LaserKernels
from tests.backends.triton.tiles import SMALL, tiles_as_given

HALF = (torch.bfloat16, torch.float16)
BOUND = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}


class LaserRun:
    """The kernels' results of a call: output, gradients by input, and which heads are close."""

    def __init__(self, x, d_out, *, causal=True, options="", seed=0, tiles=SMALL, **masks):
        leaf = mechanism(causal, options).program.leaves[0]
        frame = full_frame(x["q"].shape[1], x["k"].shape[1], x["q"], **masks)
        laser = LaserKernels()
        with torch.no_grad(), tiles_as_given(seed, tiles):
            self.out, self.residuals = laser.forward(leaf, x, frame)
            self.gradients = laser.backward(leaf, x, frame, self.out, self.residuals, d_out)
        self.is_close = self.residuals[3].bool().tolist()
        specs = {name: ArraySpec(tuple(a.shape), dtype_name(a)) for name, a in x.items()}
        shapes = [ArraySpec(tuple(r.shape), dtype_name(r)) for r in self.residuals]
        assert shapes == list(laser.residual_shapes(leaf, specs))


def mechanism(causal, options=""):
    return pa.Laser(
        replace(pa.parse(f"softmax[{options}]" if options else "softmax"), causal=causal)
    )


def wide(array):
    return array.double().numpy()


def dtype_name(array):
    return dtype_of(array.dtype)


def dtype_of(dtype):
    return str(dtype).removeprefix("torch.")


def problem(
    t, s=None, *, b=2, h=2, n=1, d=16, e=8, dtype=torch.float32, spread=1.0, options="", shared=""
):
    """Inputs and a cotangent; with a `spread` of 100 the values of a channel are far apart.

    The bias, if it is among the options, has one entry along the axes in `shared`.
    """
    s = s or t
    torch.manual_seed(t)
    q, k = torch.randn(b, t, h, d), torch.randn(b, s, n, d)
    v = torch.randn(b, s, n, e) * torch.as_tensor(spread)
    x = {"q": q, "k": k, "v": v}
    if "bias" in options:
        own = (1 if axis in shared else size for axis, size in (("b", b), ("h", h)))
        x["bias"] = torch.randn(*own, t, s)
    if "slopes" in options:
        x["slopes"] = 0.1 * torch.rand(h)
    return {name: a.to(dtype) for name, a in x.items()}, torch.randn(b, t, h, e).to(dtype)


def expected(x, d_out, *, causal=True, options="", **masks):
    """Output and gradients of the definition, in float64."""
    x = {name: a.double() for name, a in x.items()}
    with pa.use_backend("reference"):
        out, pullback = mechanism(causal, options).vjp(**x, **masks)
        return out, pullback(d_out.double())


def check(x, d_out, *, bound=None, gradient_bound=None, **options):
    """The kernels agree with the definition, and write to none of the inputs."""
    bound = bound or BOUND[x["v"].dtype]
    before = {name: a.clone() for name, a in x.items()}
    result = LaserRun(x, d_out, **options)
    out, gradients = expected(x, d_out, **{k: v for k, v in options.items() if k != "tiles"})
    assert result.out.dtype == x["v"].dtype
    assert result.gradients.keys() == gradients.keys()
    assert error(wide(result.out), wide(out)) < bound
    for name, gradient in gradients.items():
        assert result.gradients[name].dtype == x[name].dtype
        assert result.gradients[name].shape == x[name].shape
        difference = error(wide(result.gradients[name]), wide(gradient))
        assert difference < (gradient_bound or 2 * bound), name
        torch.testing.assert_close(x[name], before[name], rtol=0, atol=0, equal_nan=True)
    return result


def with_nan(array, is_masked):
    """The array with NaN at masked tokens (b, t)."""
    return array.masked_fill(is_masked[:, :, None, None], torch.nan)


# ------------------------------------------------------------------------------- close heads


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("t", "h", "n", "d", "e", "dtype"),
    [
        (1, 2, 2, 8, 16, torch.float32),
        (15, 2, 1, 12, 8, torch.float32),
        (16, 4, 2, 16, 40, torch.bfloat16),
        (17, 1, 1, 40, 12, torch.float32),
        (33, 2, 2, 16, 16, torch.float16),
        (33, 2, 1, 8, 8, torch.bfloat16),
        (48, 1, 1, 16, 8, torch.float32),
    ],
)
def test_output_and_gradients_of_every_size_and_dtype(t, h, n, d, e, dtype, causal):
    x, d_out = problem(t, b=1, h=h, n=n, d=d, e=e, dtype=dtype)
    assert check(x, d_out, causal=causal).is_close == [[True] * n]


def test_tiles_of_queries_and_keys_may_differ():
    x, d_out = problem(70, b=1, h=1)
    wide, high = Configuration(16, 32), Configuration(32, 16)
    for query, key in ((wide, high), (high, wide)):
        check(
            x,
            d_out,
            tiles={
                **SMALL,
                "laser_forward": query,
                "laser_query_gradient": key,
                "laser_key_gradient": query,
            },
        )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("t", [1, 17])
def test_fewer_queries_than_keys_are_the_last_ones(t, causal):
    x, d_out = problem(t, 40, b=1)
    check(x, d_out, causal=causal)


def test_more_queries_than_keys():
    x, d_out = problem(40, 17, b=1)
    check(x, d_out, causal=False)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_may_contain_nan(causal, dtype):
    x, d_out = problem(33, b=3, h=1, dtype=dtype)
    lengths = torch.tensor([0, 20, 33])
    is_masked = torch.arange(33) >= lengths[:, None]
    x = {name: with_nan(a, is_masked) for name, a in x.items()}
    result = check(x, with_nan(d_out, is_masked), causal=causal, lengths=lengths)
    assert (result.out[is_masked] == 0).all()
    assert all((gradient[is_masked] == 0).all() for gradient in result.gradients.values())


@pytest.mark.parametrize("causal", [True, False])
def test_queries_attend_to_their_own_segment_only(causal):
    x, d_out = problem(35, h=1)
    ids = torch.tensor([[2**40] * 10 + [1] * 8 + [2**40 + 2**32] * 17, [7] * 35])
    check(x, d_out, causal=causal, segment_ids=ids)


def test_segments_of_fewer_queries_than_keys():
    x, d_out = problem(20, 35, h=1)
    ids = torch.arange(35)[None].expand(2, 35) // torch.tensor([[12], [17]])
    check(x, d_out, segment_ids=ids)


@pytest.mark.parametrize("causal", [True, False])
def test_a_segment_from_within_a_tile_to_within_another(causal):
    """Its inner tiles have a border on both sides, and no mask."""
    x, d_out = problem(70, b=1, h=1)
    ids = torch.tensor([[0] * 20 + [1] * 47 + [2] * 3])
    check(x, d_out, causal=causal, segment_ids=ids)


@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_a_nan_in_a_key_reaches_its_own_output_and_later_ones(spread):
    x, d_out = problem(20, spread=spread)
    x["k"][:, 7, 0, 3] = torch.nan
    out = LaserRun(x, d_out).out
    assert torch.isnan(out[:, 7:]).all()
    assert torch.isfinite(out[:, :7]).all()


@pytest.mark.parametrize(("causal", "spread"), [(True, 1.0), (False, 0.1)])
def test_masked_keys_may_contain_nan_and_queries_may_have_no_visible_key(causal, spread):
    x, d_out = problem(33, h=1, spread=spread)
    key_mask = torch.arange(33) % 5 > 1  # A causal query before the third has no visible key.
    key_mask = key_mask[None] & torch.tensor([[True], [False]])
    x |= {name: with_nan(x[name], ~key_mask) for name in ("k", "v")}
    result = check(x, d_out, causal=causal, key_mask=key_mask)
    assert (result.out[1] == 0).all()
    assert (result.gradients["q"][1] == 0).all()


@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_logits_of_any_size(size):
    x, d_out = problem(33, b=1)
    x["q"] *= size
    # Float32 rounds logits of that size to 1e-3, and so their exponentials; the gradient of
    # q comes from the few rows in which two logits are nearly equal.
    bounds = {"bound": 5e-4, "gradient_bound": 1e-2} if size > 1 else {}
    check(x, d_out, **bounds)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("height", [0.0, -3.0, 1e4])
def test_constant_values_give_that_constant(dtype, height):
    x, d_out = problem(33, b=1, dtype=dtype)
    x["v"] = torch.full_like(x["v"], height)
    result = LaserRun(x, d_out)
    assert (result.out == height).all()
    assert (result.gradients["q"] == 0).all()


def test_values_near_the_limit_of_close_heads():
    x, d_out = problem(33, b=1)
    x["v"] = 60 * torch.rand(x["v"].shape) - 500
    # Values that differ much dominate attention: terms of the gradient cancel.
    assert check(x, d_out, gradient_bound=2e-4).is_close == [[True]]


@pytest.mark.parametrize("dtype", HALF)
def test_small_values_have_small_errors(dtype):
    """e^v is close to 1, where the spacing of half-precision numbers is as large as the values."""
    x, d_out = problem(33, b=1, dtype=dtype, spread=1e-2)
    check(x, d_out)


# ------------------------------------------------------------------------------- exact heads


@pytest.mark.thorough(but=("True-dtype1", "False-dtype2"))
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("causal", [True, False])
def test_values_far_apart(dtype, causal):
    x, d_out = problem(17, b=1, e=12, dtype=dtype, spread=100.0)
    assert check(x, d_out, causal=causal).is_close == [[False]]


def test_values_far_apart_with_several_groups_of_channels(monkeypatch):
    monkeypatch.setattr("precondattn_triton.softmax.laser_exact.EXACT_CHANNELS", 16)
    x, d_out = problem(17, 20, b=1, h=1, e=36, spread=100.0)
    check(x, d_out)


@pytest.mark.parametrize("causal", [True, False])
def test_values_far_apart_behind_masks(causal):
    x, d_out = problem(17, h=1, spread=100.0)
    lengths = torch.tensor([16, 5])
    is_masked = torch.arange(17) >= lengths[:, None]
    x = {name: with_nan(a, is_masked) for name, a in x.items()}
    ids = torch.tensor([[1] * 4 + [3] * 13, [0] * 17])
    result = check(x, with_nan(d_out, is_masked), causal=causal, lengths=lengths, segment_ids=ids)
    assert result.is_close == [[False], [False]]
    assert (result.out[is_masked] == 0).all()


def test_close_and_far_heads_in_one_call():
    x, d_out = problem(17, h=4, n=2, spread=torch.tensor([1.0, 100.0])[:, None])
    x["v"][1, :, 1] /= 100
    assert check(x, d_out).is_close == [[True, False], [True, True]]


def test_a_padded_value_does_not_count_for_the_spread_of_a_head():
    x, d_out = problem(17, b=1)
    x["v"][:, 16] = 1e4
    assert check(x, d_out, lengths=torch.tensor([16])).is_close == [[True]]
    assert LaserRun(x, d_out).is_close == [[False]]


@pytest.mark.parametrize("apart", [50.0, 130.0])
def test_values_that_oppose_the_scores(apart):
    """The key with the largest score has the smallest value: e^s and e^v vanish in turn."""
    x, d_out = problem(17, b=1, h=1)
    height = torch.linspace(-0.5, 0.5, 17) * apart
    x["q"], x["k"] = torch.zeros(1, 17, 1, 16), torch.zeros(1, 17, 1, 16)
    x["q"][..., 0], x["k"][0, :, 0, 0] = 4, height
    x["v"] = x["v"] - height[None, :, None, None]
    for causal in (True, False):
        result = check(x, d_out, causal=causal, gradient_bound=1e-3)
        assert result.is_close == [[apart < 60]]


def test_values_of_size_ten_thousand():
    x, d_out = problem(17, b=1, h=1, spread=300.0)
    x["v"] += 1e4
    # Float32 rounds sums s + v of that size to 1e-3, and so their exponentials.
    check(x, d_out, bound=1e-6, gradient_bound=2e-3)


@pytest.mark.thorough
def test_outputs_do_not_depend_on_later_values():
    x, d_out = problem(17, b=1, h=1, spread=100.0)
    later = {name: a.clone() for name, a in x.items()}
    later["v"][:, 12:] += 3e4
    later["k"][:, 12:] *= 7
    assert torch.equal(LaserRun(x, d_out).out[:, :12], LaserRun(later, d_out).out[:, :12])


# ------------------------------------------------------------------------------ any tensors


@pytest.mark.thorough
def test_inputs_of_any_strides():
    torch.manual_seed(0)
    x = {
        "q": torch.randn(2, 4, 16, 17).permute(0, 3, 1, 2),  # Channels are not contiguous.
        "k": torch.randn(2, 2, 20, 32)[:, :, 3:, ::2].transpose(1, 2),
        "v": torch.randn(17, 2, 2, 8).transpose(0, 1).flip(0),
    }
    x["v"][:, :, 1] *= 100
    d_out = torch.randn(17, 1, 1, 8)[None, :, 0].expand(2, 17, 4, 8)
    check(x, d_out)
    x["v"] = torch.randn(1, 17, 1, 8).expand(2, 17, 2, 8)
    check(x, torch.tensor(1.0).expand(2, 17, 4, 8))


def test_tensors_of_more_than_two_to_the_31_elements():
    x, d_out = problem(5, b=1, h=1, dtype=torch.float16)
    far = torch.empty(2**31 + 16, dtype=torch.float16)  # Almost none of it is accessed.
    for name in x:
        apart = far.as_strided(x[name].shape, (0, 2**29, 0, 1))
        check({**x, name: apart.copy_(x[name])}, d_out)


@pytest.mark.thorough
def test_any_order_of_programs_gives_the_same_bits():
    x, d_out = problem(33, h=4, n=2)
    first, second = (LaserRun(x, d_out, seed=seed) for seed in (1, 2))
    assert torch.equal(first.out, second.out)
    for name, gradient in first.gradients.items():
        assert torch.equal(gradient, second.gradients[name])


def test_shipped_tiles_compute_the_same():
    x, d_out = problem(33, b=1, h=1)
    for dtype in (torch.float32, torch.bfloat16):
        x = {name: a.to(dtype) for name, a in x.items()}
        check(x, d_out.to(dtype), tiles={})


# ------------------------------------------------------------- keys and values in parts


@pytest.fixture
def narrow_tiles(monkeypatch):
    """Keys and values of more than 16 channels are wide, and read 16 at a time."""
    widths = "precondattn_triton.softmax.widths"
    monkeypatch.setattr(f"{widths}.WIDEST_KEY", 16)
    monkeypatch.setattr(f"{widths}.WIDEST_VALUE", {dtype_of(dtype): 16 for dtype in BOUND})
    parts = dict.fromkeys((True, False), ChannelParts(32, 16))
    monkeypatch.setattr("precondattn_triton.softmax.softmax_forward.PARTS", parts)


@pytest.mark.parametrize(
    ("t", "s", "n", "d", "e", "dtype", "causal"),
    [
        (17, 20, 1, 36, 8, torch.float32, True),
        (16, 16, 2, 8, 72, torch.bfloat16, True),
        (17, 17, 1, 40, 36, torch.float16, True),
        (18, 17, 2, 20, 20, torch.float32, False),
    ],
)
def test_keys_and_values_in_parts(narrow_tiles, t, s, n, d, e, dtype, causal):
    x, d_out = problem(t, s, b=1, n=n, d=d, e=e, dtype=dtype)
    assert check(x, d_out, causal=causal).is_close == [[True] * n]


def test_keys_and_values_in_parts_behind_masks(narrow_tiles):
    x, d_out = problem(20, h=1, d=20, e=40)
    ids = torch.arange(20)[None].expand(2, 20) // torch.tensor([[7], [11]])
    is_masked = torch.arange(20) >= torch.tensor([18, 20])[:, None]
    x = {name: with_nan(a, is_masked) for name, a in x.items()}
    check(x, with_nan(d_out, is_masked), lengths=torch.tensor([18, 20]), segment_ids=ids)


@pytest.mark.parametrize(("d", "e"), [(260, 8), (8, 260)])
def test_parts_as_shipped(d, e):
    x, d_out = problem(3, b=1, h=1, d=d, e=e)
    check(x, d_out)
    x["v"] *= 100
    assert check(x, d_out).is_close == [[False]]


# --------------------------------------------------------------------------------- options

EVERYTHING = "window=13,bias=true,softcap=2,distance=slopes"


@pytest.mark.parametrize("spread", [1.0, 100.0])
@pytest.mark.parametrize(
    ("causal", "options"),
    [
        (True, "window=3"),
        (False, "window=17"),
        (False, "window=9,distance=slopes"),
        (True, "bias=true"),
        (True, "softcap=2"),
        (True, EVERYTHING),
    ],
)
def test_output_and_gradients_with_every_option(causal, options, spread):
    is_close = spread == 1.0
    x, d_out = problem(35 if is_close else 18, b=1, options=options, spread=spread)
    result = check(x, d_out, causal=causal, options=options)
    assert result.is_close == [[is_close]]


@pytest.mark.parametrize(
    ("t", "s", "h", "n", "d", "e", "dtype"),
    [
        (1, 40, 2, 1, 12, 16, torch.float32),
        (15, 15, 2, 2, 16, 20, torch.bfloat16),
        (17, 33, 4, 2, 20, 12, torch.float16),
    ],
)
def test_all_options_at_every_size_and_dtype(t, s, h, n, d, e, dtype):
    x, d_out = problem(t, s, b=1, h=h, n=n, d=d, e=e, dtype=dtype, options=EVERYTHING)
    check(x, d_out, options=EVERYTHING)


@pytest.mark.parametrize("shared", ["b", "h", "bh", ""])
def test_the_gradient_of_a_bias_is_a_sum_over_close_and_far_heads_that_share_it(shared):
    """Each sequence has a head of values far apart, and one of close values."""
    x, d_out = problem(
        9, 17, h=2, n=2, spread=torch.tensor([1.0, 100.0])[:, None], options="bias", shared=shared
    )
    result = check(x, d_out, causal=False, options="bias=true")
    assert result.is_close == [[True, False]] * 2


@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_pairs_that_a_bias_masks_and_rows_without_any(spread):
    x, d_out = problem(20, b=1, h=1, options="bias", spread=spread)
    x["bias"][..., 3:9] = -torch.inf
    x["bias"][..., 17, :] = -torch.inf
    result = check(x, d_out, options="bias=true")
    assert (result.out[:, 17] == 0).all()
    assert (result.gradients["q"][:, 17] == 0).all()


def test_a_bias_of_hundreds_is_part_of_the_largest_score():
    x, d_out = problem(35, b=1, h=1, options="bias")
    check({**x, "bias": x["bias"] + 200}, d_out, options="bias=true", bound=1e-4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 2, 16, 33, 100, 2**31])
def test_windows_of_any_size(window, causal):
    x, d_out = problem(50, 70, b=1, h=1)
    check(x, d_out, causal=causal, options=f"window={window}")


def test_tiles_of_queries_and_keys_may_differ_with_a_window():
    x, d_out = problem(90, b=1, h=1)
    high, broad = Configuration(32, 16), Configuration(16, 32)
    tiles = {"forward": broad, "query_gradient": high, "key_gradient": high}
    tiles = {**SMALL, **{f"laser_{name}": cut for name, cut in tiles.items()}}
    for causal in (True, False):
        check(x, d_out, causal=causal, options="window=50", tiles=tiles)


@pytest.mark.thorough(but=("1.0",))
@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_options_behind_masks(spread):
    """Padding may have any content."""
    x, d_out = problem(20, h=1, options=EVERYTHING, spread=spread)
    is_masked = torch.arange(20) >= torch.tensor([18, 5])[:, None]
    x |= {name: with_nan(x[name], is_masked) for name in "qkv"}
    ids = torch.tensor([[1] * 9 + [3] * 11, [0] * 20])
    masks = {"lengths": torch.tensor([18, 5]), "segment_ids": ids}
    result = check(x, with_nan(d_out, is_masked), options=EVERYTHING, **masks)
    assert (result.out[is_masked] == 0).all()


@pytest.mark.parametrize("cap", [0.01, 3000])
def test_a_soft_cap_far_above_or_below_the_scores(cap):
    x, d_out = problem(20, b=1, h=1)
    check({**x, "q": 3 * x["q"]}, d_out, options=f"softcap={cap}")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shared", ["b", ""])
def test_options_of_keys_and_values_in_parts(narrow_tiles, causal, shared):
    x, d_out = problem(17, 33, d=20, e=24, options=EVERYTHING, shared=shared)
    check(x, d_out, causal=causal, options=EVERYTHING)


def test_shipped_tiles_compute_the_same_with_options():
    for dtype in (torch.float32, torch.bfloat16):
        x, d_out = problem(33, b=1, h=2, dtype=dtype, options=EVERYTHING, shared="h")
        check(x, d_out, options=EVERYTHING, tiles={})


# --------------------------------------------------------------------------------- refusals


def refusal(leaf, *, verb="vjp", dtype="bfloat16", d=64, e=64):
    shapes = (("q", (1, 8, 2, d)), ("k", (1, 8, 1, d)), ("v", (1, 8, 1, e)))
    request = Request(verb, "torch", "cuda", dtype, shapes, frozenset())
    return LaserKernels().refuses(leaf.program.leaves[0], request)


def test_supported_calls_are_accepted():
    for size in ({}, {"d": 68}, {"d": 720, "e": 720}, {"e": 1024}, {"verb": "forward"}):
        for causal in (True, False):
            assert refusal(mechanism(causal), **size) is None


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        (pa.Softmax(forget="scaled"), "a forget gate"),
        (pa.Softmax(distance="buckets"), "buckets"),
        (pa.Path(), "not of path"),
    ],
)
def test_options_without_a_kernel_are_declined(base, reason):
    assert reason in refusal(pa.Laser(base))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float64"}, "not in float64"),
        ({"d": 1028}, "keys whose width is a multiple of 4 and at most 1024; found 1028"),
        ({"d": 66}, "found 66"),
        ({"e": 1028, "dtype": "float32"}, "values whose width is a multiple of 4 and at most 1024"),
    ],
)
def test_sizes_and_dtypes_without_a_kernel_are_declined(changes, reason):
    assert reason in refusal(pa.Laser(), **changes)


@pytest.mark.parametrize("apart", [0.0, 100.0])
def test_outputs_of_0_beside_large_values(apart):
    """Padded queries have an output of 0, far from values that differ between segments."""
    x, d_out = problem(12, b=2, h=1)
    segment = torch.arange(12) // 4
    x["v"] = x["v"] + (100 + apart * (segment % 2))[:, None, None]
    masks = {"lengths": torch.tensor([12, 5]), "segment_ids": torch.stack([segment, segment])}
    check(x, d_out, gradient_bound=1e-4, **masks)
