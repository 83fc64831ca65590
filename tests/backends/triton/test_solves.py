"""LUCID's solve by Triton's kernels, interpreted: of dot products, and in PaTH's metric."""

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn.frame import full_frame
from precondattn_triton.configurations import Configuration
from precondattn_triton.lucid.matrix import LucidMatrix
from precondattn_triton.lucid.plan import super_block_of, update_steps
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
from tests.backends.triton.tiles import small_tiles

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
    row("15 tokens", BETA, 15, n=2, d=12, e=20, dtype="float16", change=one_cluster),
    row("33 tokens", BETA, 33, b=2, n=2, d=12, e=20, change=one_cluster),
    row(
        "33 tokens in half", BETA, 33, b=2, n=2, d=12, e=20, dtype="bfloat16",
        change=one_cluster, marks=thorough,
    ),
    row(
        "65 tokens in half", BETA, 65, n=2, d=12, e=20, dtype="bfloat16", change=one_cluster,
        marks=thorough,
    ),
    *(row(f"{t} tokens", DOT, t, d=8, change=one_cluster) for t in (16, 17, 48)),
    row("equal keys", "lucid_solve[eps=0]", 50, d=8, change=equal, bound=1e-4, marks=thorough),
    row("zero keys", "lucid_solve[eps=0]", 50, d=8, change=zeros, marks=thorough),
    row("duplicate keys", DOT, 33, d=8, keys="duplicate", bound=1e-4),
    row("no token", BETA, 40, b=2, d=8, keys="clustered", lengths=(33, 0), dtype="bfloat16"),
    row("masked keys", DOT, 33, b=2, d=8, keys="clustered", hides_keys=True),
    row(
        "segments", DOT, 50, b=2, d=8, keys="clustered", segments=((7, 7, 2, 16, 18), (50,)),
        marks=thorough,
    ),
    *(
        row(f"d={d}, e={e}", DOT, 18, d=d, e=e, dtype="bfloat16", change=one_cluster)
        for d, e in ((68, 8), (16, 136), (40, 260))
    ),
    row(
        "given keys", SIXTEEN, 34, dtype="bfloat16", change=both(one_cluster, given),
        marks=thorough,
    ),
    row("growing sides", DOT, 98, d=8, dtype="bfloat16", change=both(one_cluster, growing)),
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
        "small updates", DOT, 70, d=8, change=one_cluster,
        tiles=tiles(update=(32, 16), gradient=(16, 32)),
    ),
    row(
        "large super-blocks", DOT, 70, d=8, change=one_cluster,
        tiles=tiles(inverse=(16, 128), gradient=(32, 16)), marks=thorough,
    ),
    *(
        row(
            f"{t} tokens, diagonal tiles of smaller blocks", BETA, t, d=8, change=one_cluster,
            tiles=tiles(inverse=(64, 128), update=(64, 32)), marks=marks,
        )
        for t, marks in ((33, ()), (130, thorough))
    ),
    *(
        # `substitute` reads no part of the matrix that `update` has not stored.
        row(
            f"segments within tiles, {number}", BETA, 150, d=8, dtype=dtype, change=one_cluster,
            segments=((5, 32, 33, 1, 39, 40),),
            tiles=tiles(inverse=inverse, update=update, gradient=(16, 16)),
            marks=thorough if number < 2 else (),
        )
        for number, (inverse, update, dtype) in enumerate(UNEQUAL)
    ),
    row(
        "six processors", BETA, 100, d=8, dtype="bfloat16", change=one_cluster,
        patches={PROCESSORS: lambda _: 6}, marks=thorough,
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


def of_sizes(x, d_out):
    x["v"].mul_(SIZES)
    d_out.mul_(torch.where(torch.arange(67) < 40, 1e-5, 1e5)[:, None, None])


def summing(name, expression="lucid_solve", t=67, processors=1, **options):
    """A call whose `update` sums keys: in launches of a group of super-blocks, and of one."""
    patches = {
        PROCESSORS: lambda _: processors,
        "precondattn_triton.lucid.matrix.TOKENS_OF_A_PART": 16,
    }
    given_options = {"d": 8, "e": 16, "dtype": "bfloat16", "change": one_cluster} | options
    return row(name, expression, t, patches=patches, **given_options)


KEY_SUMS = (
    summing("equal keys", change=equal, marks=thorough),
    # Equal keys hide faults of the sums: the norm takes most of the gradient away. Zeros show them.
    summing("zero keys in float16", n=2, d=12, e=20, dtype="float16", change=zeros),
    summing("zero keys", n=2, d=12, e=20, dtype="float32", change=zeros, marks=thorough),
    summing("given keys", SIXTEEN, change=both(one_cluster, given), marks=thorough),
    summing("padding", lengths=(44,)),
    summing("sizes", change=both(one_cluster, of_sizes), marks=thorough),
    summing("opposite sizes", change=both(one_cluster, scaled(v=SIZES, d_out=1 / SIZES))),
    summing("parts", t=100, processors=6, change=zeros, marks=thorough),
    # Segments that end within a super-block of 32 tokens, and that reach the next one.
    summing("packed", b=2, dtype="float16", change=zeros, segments=((5, 45, 17), (31, 9, 27))),
)  # fmt: skip


@rows(*KEY_SUMS)
def test_sums_of_keys_over_later_super_blocks(call, then):
    hold(call, then)


@pytest.mark.parametrize(("call", "then"), [KEY_SUMS[1], KEY_SUMS[7]])
def test_parts_of_the_sums_of_keys(call, then, monkeypatch):
    for target, value in call.patches.items():
        monkeypatch.setattr(target, value)
    x, d_out = call.arrays()
    frame = full_frame(call.t, call.t, x["k"])
    with small_tiles():
        matrix = LucidMatrix(call.mechanism, x, frame, backward=True)
        y = torch.nn.functional.pad(x["v"], (0, 3), value=torch.nan)[..., : call.e]
        sums = matrix.solve(d_out, torch.empty_like(d_out), None, y).keys
    assert sums[:, :, :32].isfinite().all()
    assert sums.shape[0] == (2 if call.t == 100 else 1)
    assert matrix.plan.super_block == 32


@pytest.mark.parametrize(
    ("d", "e", "dtype", "segments", "is_supported"),
    [
        (12, 20, "float32", (), True),
        (136, 16, "float16", (), True),
        (136, 16, "float16", ((7, 33),), False),
        (136, 16, "float32", (), False),
        (16, 136, "bfloat16", (), False),
    ],
)
def test_calls_whose_update_sums_keys(d, e, dtype, segments, is_supported):
    call = KernelCall(DOT, 40, d=d, e=e, dtype=dtype, segments=segments)
    x, _ = call.arrays()
    with small_tiles():
        frame = full_frame(40, 40, x["k"], **call.masks())
        matrix = LucidMatrix(call.mechanism, x, frame, backward=True)
    assert matrix._supports_key_sums(parts=1) == is_supported
    assert not matrix._supports_key_sums(parts=2)


@pytest.mark.parametrize(
    ("processors", "parts"), [(1, [0, 1, 1, 1]), (6, [0, 1, 2, 4]), (100, [0, 2, 2, 4])]
)
def test_several_programs_may_share_the_columns_of_a_tile(monkeypatch, processors, parts):
    monkeypatch.setattr(PROCESSORS, lambda _: processors)
    x, _ = KernelCall(BETA, 100, d=8, dtype="bfloat16").arrays()
    with small_tiles():
        matrix = LucidMatrix(pa.parse(BETA), x, full_frame(100, 100, x["k"]), backward=False)
    steps = update_steps(matrix.plan.tokens, matrix.plan.super_block, backward=False)
    assert [matrix._parts(step)[0] for step in steps] == parts


@pytest.mark.parametrize(
    ("tokens", "size"),
    [(256, 256), (1024, 1024), (4096, 1024), (8192, 1536), (16384, 2048), (131072, 6144)],
)
def test_super_blocks_grow_with_the_square_root_of_the_number_of_tokens(tokens, size):
    assert super_block_of(tokens, 1024, 128) == size


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
    in_path(
        "33 tokens in float16", PATH_BETA, 33, n=2, d=12, e=20, dtype="float16", marks=thorough
    ),
    in_path("65 tokens in bfloat16", PATH_BETA, 65, d=12, e=20, dtype="bfloat16", marks=thorough),
    # Borders after parts of 16, 32 and 64 tokens; the next part is as long, shorter or empty.
    *(in_path(f"{t} tokens", PATH, t) for t in (17, 32, 49)),
    *(in_path(f"{t} tokens", PATH, t, marks=thorough) for t in (80, 113)),
    *(
        in_path(f"d={d}, e={e}", PATH, 34, d=d, e=e, dtype="bfloat16", marks=marks)
        for d, e, marks in ((68, 8, thorough), (16, 136, ()), (40, 260, thorough))
    ),
    in_path(
        "tiles of scores wider than a chunk", PATH, 150, marks=thorough,
        tiles=tiles(gradient=(32, 64), update=(64, 16)),
    ),
    # Inverses begin with the scores within a chunk, and continue across borders.
    in_path(
        "chunks of two tiles", PATH, 100, tiles={"path_chunks": Configuration(32, 16)},
        marks=thorough,
    ),
    in_path(
        "chunks of two tiles in large super-blocks", PATH, 100, marks=thorough,
        tiles={"path_chunks": Configuration(32, 16), **tiles(inverse=(16, 128))},
    ),
    in_path("shipped tiles", PATH, 150, tiles=None, marks=thorough),
    in_path("shipped tiles in half", PATH, 150, dtype="bfloat16", tiles=None),
    in_path("padding", PATH_BETA, 50, b=2, lengths=(50, 13)),
    in_path("masked keys", PATH, 33, b=2, hides_keys=True),
    in_path("segments", PATH, 70, segments=((10, 8, 32, 20),)),
    *(in_path(f"directions, {beta}", PATH, 70, change=extreme(beta)) for beta in (1.0, 2.0)),
    in_path(
        "zero keys", "lucid_solve[metric=transported,eps=0]", 40, change=both(cluster, zeros),
        marks=thorough,
    ),
    in_path(
        "equal keys without reflections", "lucid_solve[metric=transported,eps=0]", 70,
        change=both(cluster, unreflected), bound=1e-4,
    ),
    in_path(
        "given keys", "lucid_solve[metric=transported,normalize=given]", 50, dtype="bfloat16",
        change=both(cluster, given), marks=thorough,
    ),
    in_path(
        # Products of dv and y overflow float16; the gradients do not.
        "large gradients", PATH, 50, e=64, dtype="float16",
        change=both(cluster, scaled(v=30, d_out=50)),
    ),
    in_path(
        # Attention and its preconditioner together, with fewer heads of keys.
        "lucid around path", "lucid(path)", 40, b=2, h=4, n=2, backend="triton", marks=thorough
    ),
)  # fmt: skip
def test_metric_of_path(call, then):
    hold(call, then)
