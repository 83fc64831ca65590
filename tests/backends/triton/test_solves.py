"""LUCID's solve by Triton's kernels, interpreted: of dot products, and in PaTH's metric."""

import pytest

pytest.importorskip("triton")

import torch

from precondattn_triton.configurations import Configuration
from tests.backends.triton.calls import (
    OF_SOLVES,
    KernelCall,
    both,
    cluster,
    doubled,
    error,
    hold,
    row,
    rows,
    scaled,
    thorough,
)

DOT, BETA = "lucid_solve", "lucid_solve[beta=true]"
PATH, PATH_BETA = "lucid_solve[metric=transported]", "lucid_solve[metric=transported,beta=true]"
SIXTEEN = "lucid_solve[normalize=given]"
PROCESSORS = "precondattn_triton.lucid.matrix.processors"


def one_cluster(x, d_out):
    """Keys around one direction for each head: most of their solve cancels."""
    x["k"].mul_(0.3).add_(torch.linspace(-1, 1, x["k"].shape[-1]))
    if "lucid_beta" in x:
        x["lucid_beta"][:, ::4] = 0


def equal(x, d_out):
    x["k"].copy_(x["k"][:, :1].expand_as(x["k"]).clone())


def zeros(x, d_out):
    x["k"][:, ::3] = 0


def given(x, d_out):
    """Keys that are normalised already."""
    x["k"] /= x["k"].square().mean(-1, keepdim=True).sqrt()


def tiles(**names):
    return {f"lucid_{name}": Configuration(*sizes) for name, sizes in names.items()}


def growing(x, d_out):
    """A super-block is divided by its largest right side, after those before it are subtracted."""
    token = torch.arange(98)[:, None, None]
    x["v"].mul_(torch.where(token < 32, 1e4, 1e-4))
    d_out.mul_(torch.where(token < 66, 1e-4, 1e4))


def is_its_value(out, gradients, _):
    """y of one token, whose gradients are all 0 but that of v."""
    assert not any(gradients[name].any() for name in gradients if name != "v")
    assert out.abs().sum() > 0


UNEQUAL = (
    ((64, 128), (32, 16), "float32"),
    ((16, 64), (64, 32), "float16"),
    ((32, 64), (16, 64), "float32"),
    ((64, 64), (128, 64), "float16"),
)


@rows(
    row("one token", DOT, 1, then=is_its_value),
    row("33 tokens", BETA, 33, b=2, n=2, d=12, e=20, change=one_cluster),
    *(row(f"{t} tokens", DOT, t, d=8, change=one_cluster) for t in (16, 48)),
    row("equal keys", "lucid_solve[eps=0]", 33, d=8, change=equal, bound=1e-4),
    row("no token", BETA, 40, b=2, d=8, keys="clustered", lengths=(33, 0), dtype="bfloat16"),
    row("masked keys", DOT, 33, b=2, d=8, keys="clustered", hides_keys=True),
    row(
        "segments", DOT, 50, b=2, d=8, keys="clustered", segments=((7, 7, 2, 16, 18), (50,)),
        marks=thorough,
    ),
    *(
        row(f"d={d}, e={e}", DOT, 18, d=d, e=e, dtype="bfloat16", change=one_cluster)
        for d, e in ((68, 8), (40, 260))
    ),
    row(
        "growing sides", DOT, 98, d=8, dtype="bfloat16", change=both(one_cluster, growing),
        marks=thorough,
    ),
    row(
        # Products of dv and y overflow float16; the gradient of the keys does not.
        "large gradients", DOT, 34, d=8, e=64, dtype="float16",
        change=both(one_cluster, scaled(v=30, d_out=50)),
    ),
    row(
        # The norm's gradient cancels most of it: factors of 8 bits would leave an error of 0.015.
        "wide clustered keys", BETA, 40, b=2, n=2, d=64, e=64, dtype="bfloat16", keys="clustered",
        bound=8e-3, gradient_bound=8e-3, marks=thorough,
    ),
    row(
        "diagonal tiles of smaller blocks", BETA, 33, d=8, change=one_cluster,
        tiles=tiles(inverse=(64, 128), update=(64, 32)),
    ),
    *(
        # `substitute` reads no part of the matrix that `update` has not stored.
        row(
            f"segments within tiles, {number}", BETA, 150, d=8, dtype=dtype, change=one_cluster,
            segments=((5, 32, 33, 1, 39, 40),),
            tiles=tiles(inverse=inverse, update=update, gradient=(16, 16)),
            marks=thorough if number < 3 else (),
        )
        for number, (inverse, update, dtype) in enumerate(UNEQUAL)
    ),
    row(
        "programs of 64 channels", BETA, 40, d=8, e=72, change=one_cluster,
        patches={"precondattn_triton.lucid.plan.ENOUGH_SOLVERS": 1},
    ),
    row(
        "shipped tiles", DOT, 600, d=64, e=64, dtype="bfloat16", change=one_cluster, tiles=None,
        marks=thorough,
    ),
)  # fmt: skip
def test_dot_products(call, then):
    hold(call, then)


SIZES = torch.where(torch.arange(16) % 2 == 0, 1e-6, 1e6).double()


def summing(name, expression="lucid_solve", t=67, processors=1, **options):
    """A call whose `update` sums keys: in launches of a group of super-blocks, and of one."""
    patches = {
        PROCESSORS: lambda _: processors,
        "precondattn_triton.lucid.matrix.TOKENS_OF_A_PART": 16,
    }
    given_options = {"d": 8, "e": 16, "dtype": "bfloat16", "change": one_cluster} | options
    return row(name, expression, t, patches=patches, **given_options)


KEY_SUMS = (
    # Equal keys would hide faults: the norm takes most of the gradient away. Zeros show them.
    summing("zero keys in float16", n=2, d=12, e=20, dtype="float16", change=zeros),
    summing("zero keys", n=2, d=12, e=20, dtype="float32", change=zeros, marks=thorough),
    summing("given keys", SIXTEEN, change=both(one_cluster, given), marks=thorough),
    summing("padding", lengths=(44,)),
    summing(
        "opposite sizes", change=both(one_cluster, scaled(v=SIZES, d_out=1 / SIZES)),
        marks=thorough,
    ),
    summing("parts", t=100, processors=6, change=zeros, marks=thorough),
    # Segments that end within a super-block of 32 tokens, and that reach the next one.
    summing("packed", b=2, dtype="float16", change=zeros, segments=((5, 45, 17), (31, 9, 27))),
)  # fmt: skip


@rows(*KEY_SUMS)
def test_sums_of_keys_over_later_super_blocks(call, then):
    hold(call, then)


OF_SEGMENTS = torch.tensor([1e6, 1e-2, 1e-12, 1e12]).double().repeat_interleave(
    torch.tensor([20, 12, 32, 34])
)[:, None, None]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "size", "of_cotangent"),
    [
        (KernelCall(DOT, 34, d=8, e=16, dtype="float32"), 1e4 ** torch.linspace(-2, 2, 16), 1.0),
        (KernelCall(DOT, 34, d=8, e=16, dtype="bfloat16"), 1e4 ** torch.linspace(-2, 2, 16), 1.0),
        (
            KernelCall(DOT, 98, d=8, dtype="bfloat16", segments=((20, 12, 32, 34),)),
            OF_SEGMENTS,
            1e-3 / OF_SEGMENTS,
        ),
        (
            KernelCall(DOT, 34, d=8, dtype="float16"),
            1.0,
            torch.where(torch.arange(34) < 3, 4000, 0.002)[:, None, None],
        ),
    ],
    ids=["channels", "channels in half", "segments", "cotangents in float16"],
)
def test_small_numbers_beside_large_ones_keep_their_digits(call, size, of_cotangent):
    """Channels, segments, and dv of tokens before large cotangents are as accurate as alone.

    The largest number in float16 is 65504.
    """
    size, of_cotangent = (torch.as_tensor(each).double() for each in (size, of_cotangent))
    change = both(one_cluster, scaled(v=size, d_out=of_cotangent))
    call = KernelCall(**{**vars(call), "change": change})
    x, d_out = call.arrays()
    out, gradients, _ = call.run(x, d_out)
    expected, pullback = call.mechanism.vjp(**doubled(x), **call.masks(), backend="reference")
    d_v = pullback(d_out.double())["v"]
    for found, right, unit in ((out, expected, size), (gradients["v"], d_v, of_cotangent)):
        pairs = zip((found.double() / unit).unbind(1), (right / unit).unbind(1), strict=True)
        difference = max(error(one.numpy(), other.numpy(), 0.1, 0.1) for one, other in pairs)
        assert difference < OF_SOLVES[call.dtype]


def extreme(strength):
    """No reflection, projections and reflections (β = 0, 1, 2); equal and zero directions."""

    def change(x, d_out):
        cluster(x, d_out)
        w = x["w"]
        x["beta"].fill_(strength)
        w[:, 10:20] = w[:, 10:11]
        w[:, 25:40] = torch.nn.functional.normalize(w[:, 25:40] * 0.1 + w[:, 9:10], dim=-1)
        w[:, 20:25] = 0

    return change


def unreflected(x, d_out):
    equal(x, d_out)
    x["beta"].zero_()


def in_path(name, expression, t, *, change=cluster, d=8, e=16, **options):
    return row(name, expression, t, d=d, e=e, change=change, **options)


@rows(
    in_path("one token", PATH, 1, then=is_its_value),
    in_path("15 tokens in bfloat16", PATH_BETA, 15, n=2, d=12, e=20, dtype="bfloat16"),
    in_path("33 tokens", PATH_BETA, 33, n=2, d=12, e=20),
    # Borders after parts of 16, 32 and 64 tokens; the next part is as long, shorter or empty.
    *(in_path(f"{t} tokens", PATH, t) for t in (32, 49)),
    in_path("113 tokens", PATH, 113, marks=thorough),
    *(
        in_path(f"d={d}, e={e}", PATH, 34, d=d, e=e, dtype="bfloat16", marks=thorough)
        for d, e in ((68, 8), (16, 136))
    ),
    in_path(
        "chunks of two tiles in large super-blocks", PATH, 100, marks=thorough,
        tiles={"path_chunks": Configuration(32, 16), **tiles(inverse=(16, 128))},
    ),
    in_path("shipped tiles in half", PATH, 150, dtype="bfloat16", tiles=None, marks=thorough),
    in_path("padding", PATH_BETA, 50, b=2, lengths=(50, 13), marks=thorough),
    in_path("masked keys", PATH, 33, b=2, hides_keys=True),
    in_path("segments", PATH, 70, segments=((10, 8, 32, 20),)),
    in_path("projections", PATH, 70, change=extreme(1.0), marks=thorough),
    in_path("reflections", PATH, 70, change=extreme(2.0)),
    in_path(
        "equal keys without reflections", "lucid_solve[metric=transported,eps=0]", 70,
        change=both(cluster, unreflected), bound=1e-4, marks=thorough,
    ),
    in_path(
        "given keys", "lucid_solve[metric=transported,normalize=given]", 50, dtype="bfloat16",
        change=both(cluster, given), marks=thorough,
    ),
    in_path(
        # Products of dv and y overflow float16; the gradients do not.
        "large gradients", PATH, 50, e=64, dtype="float16",
        change=both(cluster, scaled(v=30, d_out=50)), marks=thorough,
    ),
)  # fmt: skip
def test_metric_of_path(call, then):
    hold(call, then)
