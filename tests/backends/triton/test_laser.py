"""LASER by Triton's kernels, interpreted: heads whose values are close, and those far apart."""

import pytest

pytest.importorskip("triton")

import torch

from precondattn_triton.configurations import Configuration
from precondattn_triton.softmax.channel_parts import ChannelParts
from tests.backends.triton.calls import DTYPES, KernelCall, both, hold, row, rows, scaled, thorough

EVERYTHING = "window=13,bias=true,softcap=2,distance=slopes"
GENTLE = scaled(slopes=0.1)
FAR = scaled(v=100)
BY_HEAD = torch.tensor([1.0, 100.0])[:, None]
HIGH, BROAD = Configuration(32, 16), Configuration(16, 32)


def laser(options=""):
    return f"laser(softmax[{options}])" if options else "laser"


BOTH_SIDES = laser("causal=false")


def tiles(forward, query, key):
    return {
        "laser_forward": forward, "laser_query_gradient": query, "laser_key_gradient": key
    }  # fmt: skip


def is_close(*heads):
    """The heads of each sequence whose values are close are these."""

    def check(out, gradients, residuals):
        assert residuals[3].bool().tolist() == [list(each) for each in heads]

    return check


def second_is_zero(out, gradients, _):
    assert (out[1] == 0).all()
    assert (gradients["q"][1] == 0).all()


def has_no_row_17(out, gradients, _):
    assert (out[:, 17] == 0).all()
    assert (gradients["q"][:, 17] == 0).all()


CLOSE, APART = is_close([True]), is_close([False])


def near_the_limit(x, d_out):
    x["v"].copy_(60 * torch.rand(x["v"].shape, generator=torch.Generator().manual_seed(0)) - 500)


def close_in_the_second(x, d_out):
    x["v"].mul_(BY_HEAD)
    x["v"][1, :, 1] /= 100


def opposing(apart):
    """The key with the largest score has the smallest value: e^s and e^v vanish in turn."""

    def change(x, d_out):
        height = torch.linspace(-0.5, 0.5, 17).double() * apart
        x["q"].zero_()[..., 0] = 4
        x["k"].zero_()[0, :, 0, 0] = height
        x["v"] -= height[None, :, None, None]

    return change


def very_large(x, d_out):
    x["v"].mul_(300).add_(1e4)


def masking_bias(x, d_out):
    x["bias"][..., 3:9] = -torch.inf
    x["bias"][..., 17, :] = -torch.inf


def segments_apart(x, d_out):
    """Padded queries have an output of 0, far from values that differ between segments."""
    x["v"] += (100 + 100 * (torch.arange(12) // 4 % 2))[:, None, None]


@rows(
    row("one token", laser(), 1, h=2, n=2, d=8, e=16, smallest=1e-3, then=is_close([True, True])),
    row("wide keys", laser(), 17, d=40, e=12, then=CLOSE),
    row(
        "float16", laser(), 33, h=2, n=2, e=16, dtype="float16", then=is_close([True, True]),
        marks=thorough,
    ),
    row("broad and high tiles", laser(), 70, tiles=tiles(BROAD, HIGH, BROAD)),
    row("last queries", laser(), 17, s=40),
    row(
        "padding", laser(), 33, b=3, dtype="bfloat16", lengths=(0, 20, 33),
        then=is_close([True], [True], [True]),
    ),
    row("segments", laser(), 35, b=2, segments=((10, 8, 17), (35,))),
    # The inner tiles of the second segment have a border on both sides, and no mask.
    row("a long segment, to both sides", BOTH_SIDES, 70, segments=((20, 47, 3),)),
    row("masked keys", laser(), 33, b=2, hides_keys=True, then=second_is_zero),
    # Float32 rounds logits of that size to 1e-3, and so their exponentials; the gradient of q comes
    # from the few rows in which two logits are nearly equal.
    row(
        "large logits", laser(), 33, b=2, h=2, change=scaled(q=1e4),
        bound=5e-4, gradient_bound=1e-2,
    ),
    # Values that differ much dominate attention: terms of the gradient cancel.
    row("nearly apart", laser(), 33, change=near_the_limit, gradient_bound=2e-4, then=CLOSE),
    # e^v is close to 1, where the spacing of these numbers is as large as the values.
    row("small values in bfloat16", laser(), 33, change=scaled(v=1e-2), dtype="bfloat16"),
    row(
        "shipped tiles, all options in half", laser(EVERYTHING), 33, h=2, change=GENTLE,
        shared="h", dtype="bfloat16", tiles=None,
    ),
)  # fmt: skip
def test_close_values(call, then):
    hold(call, then)


@rows(
    row("float32", laser(), 17, h=2, e=12, change=FAR, then=APART),
    row("float16", laser(), 17, e=12, change=FAR, dtype="float16", then=APART, marks=thorough),
    row(
        "bfloat16", BOTH_SIDES, 17, h=2, e=12, change=FAR, dtype="bfloat16", then=APART,
        marks=thorough,
    ),
    row(
        "several groups of channels", laser(), 17, s=20, e=20, change=FAR,
        patches={"precondattn_triton.softmax.laser_exact.EXACT_CHANNELS": 16}, marks=thorough,
    ),
    row(
        "masks", BOTH_SIDES, 17, b=2, change=FAR, lengths=(16, 5), segments=((4, 13), (17,)),
        then=is_close([False], [False]),
    ),
    row(
        "close and far heads", laser(), 17, b=2, h=2, n=2, change=close_in_the_second,
        then=is_close([True, False], [True, True]), marks=thorough,
    ),
    *(
        row(
            f"{apart} against the scores, {base}", base, 17, change=opposing(apart),
            gradient_bound=1e-3, then=is_close([apart < 60]),
        )
        for apart, base in ((50.0, laser()), (130.0, BOTH_SIDES))
    ),
    # Float32 rounds sums s + v of that size to 1e-3, and so their exponentials.
    row("very large", laser(), 17, change=very_large, bound=1e-6, gradient_bound=2e-3),
    row(
        "segments apart", laser(), 12, b=2, change=segments_apart, lengths=(12, 5),
        segments=((4, 4, 4), (4, 4, 4)), gradient_bound=1e-4, marks=thorough,
    ),
)  # fmt: skip
def test_values_far_apart(call, then):
    hold(call, then)


def windowed(window, causal):
    options = f"window={window},causal={causal}"
    return row(options, laser(options), 34, s=50)


@rows(
    row(
        "window to both sides", laser("causal=false,window=17"), 18, change=FAR, then=APART,
        marks=thorough,
    ),
    row("all", laser(EVERYTHING), 35, h=2, change=GENTLE, then=CLOSE),
    row("all, far apart", laser(EVERYTHING), 18, h=2, change=scaled(v=100, slopes=0.1), then=APART),
    row("all, last query", laser(EVERYTHING), 1, s=40, h=2, d=12, e=16, change=GENTLE),
    row(
        "all, float16", laser(EVERYTHING), 17, s=33, h=4, n=2, d=20, e=12, dtype="float16",
        change=GENTLE, marks=thorough,
    ),
    *(
        row(
            f"bias shared by {shared or 'none'}", laser("causal=false,bias=true"), 9, s=17, b=2,
            h=2, n=2, shared=shared, change=scaled(v=BY_HEAD), then=is_close(*2 * [[True, False]]),
        )
        for shared in ("bh", "")
    ),
    row("masking bias", laser("bias=true"), 20, change=masking_bias, then=has_no_row_17),
    row(
        "masking bias, far apart", laser("bias=true"), 20, change=both(FAR, masking_bias),
        then=has_no_row_17, marks=thorough,
    ),
    row(
        "large bias", laser("bias=true"), 35, bound=1e-4,
        change=lambda x, d_out: x["bias"].add_(200),
    ),
    *(windowed(*each) for each in ((1, "true"), (2, "false"), (2**31, "false"))),
    row("window of unequal tiles", laser("window=50"), 90, tiles=tiles(BROAD, HIGH, HIGH)),
    *(
        row(
            f"masks, {spread}", laser(EVERYTHING), 21, b=2, change=scaled(v=spread, slopes=0.1),
            lengths=(18, 5), segments=((9, 12), (21,)), marks=marks,
        )
        for spread, marks in ((1.0, ()), (100.0, thorough))
    ),
    row("low soft cap", laser("softcap=0.01"), 20, change=scaled(q=3)),
    row("high soft cap", laser("softcap=3000"), 20, change=scaled(q=3)),
)  # fmt: skip
def test_options(call, then):
    hold(call, then)


WIDTHS = "precondattn_triton.softmax.channel_parts"
NARROW = {
    f"{WIDTHS}.WIDEST_KEY": 16,
    f"{WIDTHS}.WIDEST_VALUE": dict.fromkeys(DTYPES, 16),
    "precondattn_triton.softmax.softmax_forward.PARTS": dict.fromkeys(
        (True, False), ChannelParts(32, 16)
    ),
}
"""Keys and values of more than 16 channels are wide, and read 16 at a time."""


@rows(
    row("wide keys", laser(), 17, s=20, h=2, d=36, patches=NARROW, then=CLOSE),
    row("wide values", laser(), 16, h=2, n=2, d=8, e=72, dtype="bfloat16", patches=NARROW),
    row(
        "masks", laser(), 20, b=2, d=20, e=40, lengths=(18, 20),
        segments=((7, 7, 6), (11, 9)), patches=NARROW,
    ),
    row(
        "all options to both sides", laser(f"causal=false,{EVERYTHING}"), 17, s=33, b=2, h=2,
        d=20, e=24, shared="b", change=GENTLE, patches=NARROW,
    ),
    row("260 channels of keys, far apart", laser(), 3, d=260, change=FAR, then=APART),
    row("260 channels of values, far apart", laser(), 3, e=260, change=FAR, then=APART),
)  # fmt: skip
def test_keys_and_values_in_parts(call, then):
    hold(call, then)


@pytest.mark.parametrize(
    ("height", "dtype"),
    [(-3.0, "float16"), (1e4, "bfloat16")],
)
def test_constant_values_give_that_constant(height, dtype):
    call = KernelCall("laser", 33, h=2, dtype=dtype)
    x, d_out = call.arrays()
    x["v"].fill_(height)
    out, gradients, _ = call.run(x, d_out)
    assert (out == x["v"][0, 0, 0, 0]).all()
    assert (gradients["q"] == 0).all()


def test_tensors_of_more_than_two_to_the_31_elements():
    call = KernelCall("laser", 5, dtype="float16")
    x, d_out = call.arrays()
    expected, wanted, _ = call.run(x, d_out)
    far = torch.empty(2**31 + 16, dtype=torch.float16)  # Almost none of it is accessed.
    for name in x:
        apart = far.as_strided(x[name].shape, (0, 2**29, 0, 1))
        out, gradients, _ = call.run({**x, name: apart.copy_(x[name])}, d_out)
        assert torch.equal(out, expected)
        assert all(torch.equal(gradients[other], wanted[other]) for other in wanted)
