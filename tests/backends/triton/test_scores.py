"""Softmax with options and PaTH by Triton's kernels, interpreted."""

import pytest

pytest.importorskip("triton")

import torch

from precondattn_triton.configurations import Configuration
from tests.backends.triton.calls import KernelCall, hold, row, rows, scaled, thorough
from tests.backends.triton.tiles import SMALL

EVERYTHING = "softmax[window=21,bias=true,softcap=2,sink=true,distance=slopes]"
GENTLE = scaled(slopes=0.1)
HIGH, BROAD = Configuration(32, 16), Configuration(16, 32)
UNEQUAL = {
    "softmax_forward": BROAD,
    "softmax_query_gradient": HIGH,
    "softmax_key_gradient": HIGH,
    "softmax_bias_gradient": BROAD,
}


def path_tiles(rows, chunk):
    tiles = dict.fromkeys((name for name in SMALL if "path" in name), Configuration(rows, 16))
    return {**tiles, "path_chunks": Configuration(chunk, 16)}


def masking_bias(x, d_out):
    """Pairs that a bias masks, and a query without any key."""
    x["bias"][..., 3:9] = -torch.inf
    x["bias"][..., 17, :] = -torch.inf


def has_no_row_17(out, gradients, _):
    assert (out[:, 17] == 0).all()
    assert (gradients["q"][:, 17] == 0).all()


def second_is_zero(out, gradients, _):
    """The second sequence has no visible key."""
    assert (out[1] == 0).all()
    assert (gradients["q"][1] == 0).all()


def coinciding(x, d_out):
    x["k"][:, 5:25] = x["k"][:, 5:6]
    x["k"][:, 28:] = 0


def sinks(x, d_out):
    """One sink takes hardly any of the weight, the other nearly all of it."""
    x["sink"].copy_(torch.tensor([-200.0, 20.0]))


def nearly_one_key(x, d_out):
    x["k"].mul_(0.02).add_(1)


def windowed(window, causal, t=50, s=70):
    expression = f"softmax[window={window},causal={causal}]"
    return row(f"window {window} causal={causal}", expression, t, s=s)


@rows(
    row("bias", "softmax[bias=true]", 33, h=2),
    row("slopes", "softmax[distance=slopes]", 33, h=2, change=GENTLE),
    row("all, last query", EVERYTHING, 1, s=40, h=2, d=12, e=16),
    row(
        "all, float16", EVERYTHING, 17, s=33, h=4, n=2, d=20, e=12, dtype="float16", shared="h",
        marks=thorough,
    ),
    row("all, duplicate and zero keys", EVERYTHING, 33, change=coinciding, shared="b"),
    row("all, tiles of unequal sizes", EVERYTHING, 70, b=2, shared="b", tiles=UNEQUAL),
    row("all, shipped tiles in half", EVERYTHING, 33, dtype="bfloat16", tiles=None),
    row(
        "shared by all",
        "softmax[bias=true,causal=false]", 17, s=20, b=2, h=2, shared="bh",
    ),
    row(
        "masking bias", "softmax[bias=true,sink=true]", 20, change=masking_bias, then=has_no_row_17
    ),
    *(windowed(*each) for each in ((2, "true"), (5, "false"), (2**31, "false"))),
    row(
        "more queries than keys", "softmax[window=20,causal=false,distance=slopes]", 40, s=17,
        change=GENTLE,
    ),
    row(
        "window of unequal tiles", "softmax[window=50,causal=false,bias=true]", 90,
        tiles=UNEQUAL, marks=thorough,
    ),
    row(
        "padding", "softmax[window=12,bias=true,softcap=3,sink=true]", 33, b=2,
        dtype="bfloat16", lengths=(0, 20),
    ),
    row(
        "masked keys", "softmax[window=9,sink=true]", 33, b=2, hides_keys=True, then=second_is_zero
    ),
    row("segments in a window", "softmax[window=9]", 30, s=60, b=2, segments=((17, 8, 35), (60,))),
    row(
        "segments to both sides", "softmax[causal=false,softcap=3]", 60, b=2,
        segments=((17, 8, 35), (60,)),
    ),
    row("low soft cap", "softmax[softcap=0.01]", 20, change=scaled(q=3)),
    row("high soft cap", "softmax[softcap=3000]", 20, change=scaled(q=3)),
    row("extreme sinks", "softmax[sink=true]", 20, h=2, change=sinks),
    row(
        # Only the sums of the rows of dS remain in the gradient of a query.
        "precise, equal keys", "softmax[softcap=20]", 33, dtype="bfloat16",
        change=nearly_one_key, is_precise=True, bound=2e-3,
    ),
)  # fmt: skip
def test_softmax_with_options(call, then):
    hold(call, then)


def test_a_window_of_one_key_has_no_gradient_of_scores():
    call = KernelCall("softmax[window=1,causal=false]", 33, 50)
    x, d_out = call.arrays()
    out, gradients, _ = call.run(x, d_out)
    torch.testing.assert_close(out, x["v"][:, 17:])
    assert max(gradients[name].abs().max() for name in "qk") < 1e-6
    torch.testing.assert_close(gradients["v"][:, 17:], d_out)
    assert (gradients["v"][:, :17] == 0).all()


def extreme(beta):
    """Strengths of `beta`: none, projections, reflections. Equal and zero directions and keys."""

    def change(x, d_out):
        w = x["w"]
        x["beta"].fill_(beta)
        w[:, 10:20] = w[:, 10:11]
        w[:, 25:] = torch.nn.functional.normalize(w[:, 25:] * 0.1 + w[:, 9:10], dim=-1)
        w[:, 20:25] = 0
        x["k"][:, 5:30] = x["k"][:, 5:6]

    return change


def correlated(x, d_out):
    """Directions for which the Neumann series by repeated doubling would lose digits."""
    w = 0.1 * x["w"] * x["w"].shape[-1] ** 0.5 + x["w"][:, :1] * x["w"].shape[-1] ** 0.5
    x["w"].copy_(torch.nn.functional.normalize(w, dim=-1))
    x["beta"].fill_(1)


WIDEST, BUDGET = (f"precondattn_triton.path.{name}" for name in ("blocks.WIDEST", "groups.BUDGET"))


@rows(
    row("one token", "path", 1, d=8, e=16, smallest=1e-3),
    row("bfloat16", "path", 16, h=2, n=2, e=20, dtype="bfloat16"),
    row("float16", "path", 20, e=16, dtype="float16"),
    row("two blocks, two queries of a key", "path", 50, h=2),
    row("one chunk at a time", "path", 40, s=72, patches={BUDGET: 1, WIDEST: 8}, marks=thorough),
    row("tiles larger than chunks", "path", 37, s=40, tiles=path_tiles(32, 16)),
    row("tiles smaller than chunks", "path", 37, s=40, tiles=path_tiles(16, 32), marks=thorough),
    row("small window", "path[window=2]", 33, s=40),
    row("padding", "path", 33, b=2, lengths=(0, 20), marks=thorough),
    row("masked keys", "path", 33, b=2, hides_keys=True, then=second_is_zero),
    row("segments", "path", 50, segments=((10, 8, 32),)),
    *(row(f"extreme directions, {beta}", "path", 40, change=extreme(beta)) for beta in (1, 2)),
    # Float32 rounds logits of that size to 1e-5, and so their exponentials.
    row("large logits", "path", 33, change=scaled(q=30), bound=2e-4, marks=thorough),
    row(
        "correlated directions", "path", 32, d=32, change=correlated,
        tiles={"path_chunks": Configuration(32, 16)},
    ),
    row("shipped tiles in half", "path", 35, dtype="bfloat16", tiles=None),
)  # fmt: skip
def test_path(call, then):
    hold(call, then)


def test_in_a_precise_kernel_equal_keys_give_queries_of_path_a_gradient_of_zero():
    """Without reflections, dq = Σ dS k of one k, and the rows of dS sum to 0."""
    call = KernelCall("path", 40, e=16, dtype="bfloat16", is_precise=True)
    x, d_out = call.arrays()
    x |= {"k": 16 * x["k"][:, :1].expand_as(x["k"]), "beta": torch.zeros_like(x["beta"])}
    assert call.run(x, d_out)[1]["q"].abs().max() < 1e-4 * x["k"].abs().max()


@pytest.mark.parametrize(
    ("expression", "spread"), [("softmax[softcap=2]", 1), ("laser", 1), ("laser", 100), ("path", 1)]
)
def test_a_nan_in_a_key_reaches_its_own_output_and_later_ones(expression, spread):
    call = KernelCall(expression, 20, change=scaled(v=spread))
    x, d_out = call.arrays()
    x["k"][:, 7, 0, 3] = torch.nan
    out = call.run(x, d_out)[0]
    assert torch.isnan(out[:, 7:]).all()
    assert torch.isfinite(out[:, :7]).all()
