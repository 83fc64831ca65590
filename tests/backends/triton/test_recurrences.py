"""Leaves with a state by Triton's kernels, interpreted: the delta rule, gates and CCQ."""

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn.kernel_backend.precise import VARIABLE
from precondattn_triton.ccq import conditioned_read
from precondattn_triton.configurations import Configuration
from tests.backends.triton.calls import (
    BACKENDS,
    OF_RECURRENCES,
    KernelCall,
    both,
    doubled,
    error,
    hold,
    row,
    rows,
    scaled,
    thorough,
)
from tests.backends.triton.tiles import RECURRENT, small_tiles

CHUNKS_OF_32 = dict.fromkeys(RECURRENT, Configuration(32, 16))
CHUNKS_OF_64 = dict.fromkeys(RECURRENT, Configuration(64, 16))


def mild(x, d_out):
    """Gates of the size of a layer's, open and closed writes, and keys of length 1."""
    for name in {"g", "g_atk"} & {*x}:
        x[name] *= 0.3
    if "beta" in x:
        x["beta"][:, ::4], x["beta"][:, 1::4] = 0, 1
    unit(x, d_out)


def unit(x, d_out):
    x["k"] /= x["k"].norm(dim=-1, keepdim=True).clamp_min(1e-30)


def extreme(x, d_out):
    """Open gates next to closed ones."""
    for name in {"g", "g_atk"} & {*x}:
        drawn = torch.randint(0, 4, x[name].shape, generator=torch.Generator().manual_seed(0))
        x[name].copy_(torch.tensor([0.0, -1e-6, -20.0, -1e4])[drawn])
    unit(x, d_out)


def equal(x, d_out):
    x["k"].copy_(x["k"][:, :1].expand_as(x["k"]).clone())


def zeros(x, d_out):
    x["k"][:, ::3] = 0


def strong(x, d_out):
    x["beta"].fill_(1.95)


def positive(x, d_out):
    x["q"].abs_(), x["k"].abs_()


def recurrent(name, expression, t, *, change=mild, d=12, **options):
    return row(name, expression, t, change=change, d=d, **options)


@rows(
    recurrent("a chunk and a token, blocks of channels", "gated_delta", 33, d=20, e=40),
    recurrent("one token in float16", "gated_delta", 1, d=8, dtype="float16"),
    recurrent("clustered keys", "gated_delta", 32, keys="clustered", bound=1e-5),
    recurrent("equal keys", "gated_delta", 32, change=both(mild, equal), bound=1e-5),
    recurrent("zero keys and extreme gates", "gated_delta", 32, u=2, change=both(extreme, zeros)),
    *(
        # Coinciding keys cost a precise kernel no accuracy in float16.
        recurrent(
            f"precise, {keys}", "delta", 40, change=both(mild, strong, *more), keys=keys,
            dtype="float16", is_precise=True, bound=8e-4,
        )
        for keys, more in (("clustered", ()), ("random", (equal,)))
    ),
    recurrent("segments", "gated_delta", 20, b=2, segments=((3, 12, 5), (20,))),
    recurrent("padding", "gated_delta", 20, b=2, lengths=(20, 3)),
    recurrent("masked keys", "gated_delta", 20, b=2, hides_keys=True),
    recurrent("linear", "linear", 17, h=2),
    recurrent("normalised", "linear[normalize=true]", 17, h=2, change=positive),
    recurrent("last queries", "retention", 11, s=18),
    *(
        recurrent(f"last queries of {name}", name, 11, s=18, marks=marks)
        for name, marks in (("gla", thorough), ("rwkv6", thorough), ("gsa", ()), ("kda", thorough))
    ),
    recurrent("gdn2 in half", "gdn2[scale=0.3]", 16, dtype="bfloat16"),
    recurrent("comba", "comba", 33, d=20, u=2, change=extreme, marks=thorough),
    recurrent("three steps in half", "delta_product[steps=3,scale=0.3]", 9, u=2, dtype="bfloat16"),
    recurrent("atk", "atk", 33, change=extreme, marks=thorough),
    recurrent("learned atk in half", "atk[learned=true]", 9, u=2, dtype="bfloat16"),
)  # fmt: skip
def test_one_gate_for_a_head(call, then):
    hold(call, then)


@rows(
    recurrent("gla in half", "gla", 16, d=20, h=2, dtype="float16", tiles=CHUNKS_OF_32),
    recurrent("rwkv6 in half", "rwkv6", 16, d=20, h=2, dtype="bfloat16", tiles=CHUNKS_OF_32),
    recurrent("kda", "kda", 33, d=20, tiles=CHUNKS_OF_32, marks=thorough),
    recurrent("zero keys of kda", "kda", 33, change=both(extreme, zeros), tiles=CHUNKS_OF_32,
              bound=1e-5),
    *(
        # All halvings of a chunk as it is shipped.
        recurrent(
            f"{name} in shipped chunks, {change.__name__}", name, 64, d=8, change=change,
            tiles=CHUNKS_OF_64, segments=((37, 27),), marks=() if name == "gla" else thorough,
        )
        for name, change in (("gla", extreme), ("rwkv6", extreme), ("kda", extreme))
    ),
    recurrent("two blocks of gates", "gsa", 33, d=20, h=2, m=20, marks=thorough),
)  # fmt: skip
def test_a_gate_for_each_channel(call, then):
    hold(call, then)


def test_factors_in_bfloat16_are_rounded_unless_kernels_are_precise(monkeypatch):
    x, d_out = KernelCall("gated_delta", 40, d=12, u=2, dtype="bfloat16", change=mild).arrays()
    d_g = pa.GatedDelta().vjp(**doubled(x), backend="reference")[1](d_out.double())["g"]
    errors = []
    for value in ("1", "0"):
        monkeypatch.setenv(VARIABLE, value)
        with small_tiles():
            found = pa.GatedDelta().vjp(**x, backend=BACKENDS)[1](d_out)["g"]
        errors.append(float((found - d_g).abs().max() / d_g.abs().max()))
    assert errors[0] < 3e-3 < errors[1] < 2e-2


def with_states(layer, x):
    """A cache with random states."""
    cache = layer.init_cache(**x)
    drawn = torch.Generator().manual_seed(0)
    return cache._replace(
        store={n: torch.rand(a.shape, generator=drawn) for n, a in cache.store.items()}
    )


def of(found, expected):
    return error(found.double().numpy(), expected.double().numpy(), 0.0, 0.1)


@pytest.mark.parametrize(
    ("expression", "dtype", "heads"),
    [
        ("gated_delta", "float32", {"u": 2}), ("comba", "float32", {"u": 2}),
        ("linear", "bfloat16", {"h": 4, "n": 2}), ("rwkv6", "bfloat16", {"h": 4, "n": 2}),
        ("gsa", "float32", {"h": 4, "n": 2}), ("kda", "bfloat16", {"u": 2}),
    ],
)  # fmt: skip
def test_a_token_reads_and_writes_the_state_once(expression, dtype, heads):
    """Several queries or values of a key, several blocks of values, a closed gate."""
    layer = pa.parse(expression)
    x, _ = KernelCall(expression, 1, b=2, d=12, e=40, dtype=dtype, change=mild, **heads).arrays()
    if "g" in x:
        x["g"][:, :, 0] = -1e4
    if "beta" in x:
        x["beta"][:] = 0.7
    cache = with_states(layer, x)
    exact_one = cache._replace(store=doubled(cache.store))
    expected, last = layer.extend(exact_one, **doubled(x), backend="reference")
    with small_tiles():
        out, new = layer.extend(cache, **x, backend=BACKENDS)
    assert of(out, expected) < OF_RECURRENCES[dtype]
    for name, state in last.store.items():
        assert of(new.store[name], state) < 2e-6
        assert new.store[name].dtype == torch.float32


# ----------------------------------------------------------------------------------- CCQ's query

IN_HALF_TOO = {
    f"{conditioned_read.__name__}.SHARING": (torch.bfloat16, torch.float16, torch.float32)
}
TWO_PASSES = {f"{conditioned_read.__name__}.SHARING": ()}


def around(x, d_out):
    """Keys that vary around a direction, so that their mean and covariance both matter."""
    x["k"] += torch.linspace(-0.5, 0.5, x["k"].shape[-1])
    if "g" in x:
        x["g"] *= 0.3
    if "beta" in x:
        x["beta"] /= 2


def hardly_varying(x, d_out):
    """The covariance is a difference of two large numbers."""
    x["k"].mul_(1e-2).add_(torch.linspace(-2, 2, x["k"].shape[-1]))


def zero_rows(x, d_out):
    x["k"][:, 4], x["q"][:, 6] = 0, 0


def ccq(name, expression, t, *, change=around, d=12, patches=IN_HALF_TOO, **options):
    return row(
        name, expression, t, change=change, d=d, patches=patches, backend="triton", **options
    )


@rows(
    ccq("one chunk", "ccq(gated_delta)", 16, d=20, e=40),
    ccq("one token", "ccq(gated_delta)", 1, u=2),
    ccq("two passes", "ccq(gated_delta)", 18, u=2, patches=TWO_PASSES),
    ccq("raw keys", "ccq[backbone_key=raw](delta)", 18, change=both(around, unit)),
    ccq("kda", "ccq(kda)", 17, u=2, marks=thorough),
    ccq("float16", "ccq(linear)", 18, d=20, e=24, dtype="float16"),
    ccq("gla in bfloat16", "ccq(gla)", 18, d=20, e=24, dtype="bfloat16", marks=thorough),
    # One segment ends at a chunk's border, one within a chunk, and one spans several chunks.
    ccq("segments", "ccq(gated_delta)", 57, segments=((3, 13, 37, 4),), marks=thorough),
    ccq("padding", "ccq(ssd)", 20, b=2, lengths=(20, 3)),
    ccq("masked keys", "ccq(gla)", 20, b=2, hides_keys=True, marks=thorough),
    ccq("last queries", "ccq(gated_delta)", 19, s=35, marks=thorough),
    ccq(
        "query alone, rows of zeros", "conditioned_query[eps=0]", 19, h=2,
        change=both(around, zero_rows),
    ),
    ccq("query alone, keys that hardly vary", "conditioned_query", 40, change=hardly_varying),
)  # fmt: skip
def test_contracted_queries(call, then):
    hold(call, then)


@pytest.mark.parametrize("ratio", [0.1, 1e-30])
def test_rows_so_long_or_short_that_their_squares_overflow_or_vanish(ratio):
    """The squares of a query are summed in two blocks of channels, the larger ones last."""
    layer = pa.ConditionedQuery(eps=0)
    x, _ = KernelCall("conditioned_query", 18, d=20, change=scaled(k=1e-25, q=1e25)).arrays()
    x["q"][..., :16] *= ratio
    x["q"][:, 3] = 0.0
    expected = layer(**doubled(x), backend="reference")
    with small_tiles():
        out = layer(**x, backend="triton")
    assert of(out, expected) < OF_RECURRENCES["float32"]
