"""CCQ's query by its own kernels, and in one pass with its backbone, interpreted."""

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn.algebra.group import Group, group_of
from precondattn.backend import Request
from precondattn_triton import Triton
from precondattn_triton.ccq import conditioned_read
from tests.backends.triton.test_recurrences import BOUNDS, doubled
from tests.backends.triton.tiles import error, small_tiles

SHARING = ("gated_delta", "delta", "ssd", "retention", "linear", "gla", "kda")
ALL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def problem(layer, t, d=12, e=8, b=1, h=1, n=1, u=1):
    """Keys that vary around a direction, so that their mean and covariance both matter."""
    torch.manual_seed(t)
    sizes = {"b": b, "t": t, "s": t, "d": d, "e": e, "h": h, "n": n, "u": u}
    x = {name: torch.randn(pattern.shape(sizes)) for name, pattern in layer.inputs.items()}
    x["k"] += 0.5 * torch.randn(d)
    x["contraction"] = torch.rand_like(x["contraction"])
    if "g" in x:
        x["g"] = -0.3 * x["g"].abs()
    if "beta" in x:
        x["beta"] = torch.rand_like(x["beta"])
    return x


def check(layer, x, dtype=torch.float32, **masks):
    """Output and gradients by these kernels only, against the definition in float64."""
    x = {name: array.to(dtype) for name, array in x.items()}
    expected, pullback = layer.vjp(**doubled(x), **masks, backend="reference")
    d_out = torch.randn(expected.shape).to(dtype)
    gradients = pullback(d_out.double())
    with small_tiles():
        out, pullback = layer.vjp(**x, **masks, backend="triton")
        result = pullback(d_out)
    assert error(out, expected) < BOUNDS[dtype]
    for name, gradient in gradients.items():
        assert error(result[name], gradient) < 2 * BOUNDS[dtype], name
        assert result[name].dtype == dtype


# Slow: two passes; the tests of the recurrences and of `conditioned_query` run their kernels too.
@pytest.fixture(
    params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["one pass", "two passes"]
)
def passes(request, monkeypatch):
    """Runs the query and its backbone in one pass in every dtype, or in two passes."""
    monkeypatch.setattr(conditioned_read, "SHARING", ALL_DTYPES if request.param else ())


def refusal(expression, verb="vjp", **changes):
    layer = pa.parse(expression)
    group = Group(group_of(layer))
    shapes = {name: tuple(a.shape) for name, a in problem(layer, 4).items()}
    shapes = {name: changes.get(name, shapes[name]) for name in group.inputs}
    request = Request(verb, "torch", "cpu", "float32", tuple(shapes.items()), frozenset())
    return Triton().refusal(group, request)


@pytest.mark.parametrize("base", SHARING)
def test_the_query_and_a_backbone_that_reads_the_same_keys_run_in_one_pass(base):
    assert refusal(f"ccq({base})") is None


@pytest.mark.parametrize(
    ("expression", "changes", "reason"),
    [
        ("ccq(rwkv6)", {}, "no kernels"),
        ("ccq[covariance=decayed](retention)", {}, "no decay"),
        ("ccq(linear[normalize=true])", {}, "one recurrence"),
        ("ccq(ssd)", {"verb": "extend"}, "no step"),
        ("ccq(ssd)", {"v": (1, 4, 1, 600)}, "e=600"),
    ],
)
def test_other_backbones_and_extensions_are_left_to_the_leaves(expression, changes, reason):
    assert reason in refusal(expression, **changes)


@pytest.mark.thorough(but=("one pass-1-heads2", "one pass-16-heads1"))
@pytest.mark.parametrize(("t", "heads"), [(33, {"u": 2}), (16, {}), (1, {})])
def test_gated_delta_at_the_borders_of_chunks(passes, t, heads):
    """Three chunks, the last of one token; value heads that share their keys."""
    layer = pa.parse("ccq(gated_delta)")
    check(layer, problem(layer, t, d=20, e=40, **heads))


@pytest.mark.parametrize(
    ("expression", "t", "heads"),
    [
        ("ccq(delta)", 31, {}),
        ("ccq[backbone_key=raw](delta)", 18, {}),
        ("ccq(ssd)", 33, {"u": 2}),
        ("ccq(retention)", 17, {"h": 2}),
        ("ccq(linear)", 17, {"h": 4, "n": 2, "b": 2}),
        ("ccq(gla)", 33, {"h": 4, "n": 2}),
        ("ccq(kda)", 33, {"u": 2}),
    ],
)
def test_backbones_that_read_unit_keys_or_keys_as_they_are(passes, expression, t, heads):
    layer = pa.parse(expression)
    x = problem(layer, t, **heads)
    if "raw" in expression:
        x["k"] /= x["k"].norm(dim=-1, keepdim=True)
    check(layer, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("expression", ["ccq(gated_delta)", "ccq(linear)", "ccq(gla)"])
def test_half_precision(expression, dtype):
    layer = pa.parse(expression)
    check(layer, problem(layer, 34, d=20, e=24), dtype)


@pytest.mark.thorough
@pytest.mark.parametrize("expression", ["ccq(gated_delta)", "ccq(ssd)", "ccq(gla)"])
def test_packed_padded_and_masked_tokens(passes, expression):
    """One segment ends at a chunk's border, one within a chunk, and one spans several chunks."""
    layer = pa.parse(expression)
    x = problem(layer, 57)
    check(layer, x, segment_ids=torch.tensor([[0] * 3 + [1] * 13 + [2] * 37 + [7] * 4]))
    x = problem(layer, 20, b=2)
    for array in x.values():
        array[1, 3:] = torch.nan
    check(layer, x, lengths=torch.tensor([20, 3]))
    is_visible = torch.arange(20)[None] % 3 == 1
    check(layer, problem(layer, 20), key_mask=is_visible)


def test_fewer_queries_than_keys_are_those_of_the_last_tokens(passes):
    layer = pa.parse("ccq(gated_delta)")
    x = problem(layer, 35)
    late = {name: x[name][:, 16:] for name in ("q", "contraction")}
    check(layer, x | late)


def test_the_query_alone_with_arbitrary_strides_and_rows_of_zero():
    layer = pa.ConditionedQuery(eps=0)
    x = problem(layer, 19, h=2)
    x["k"][:, 4], x["q"][:, 6] = 0, 0
    for name, array in x.items():
        axes = [*reversed(range(array.ndim))]
        x[name] = array.permute(axes).contiguous().permute(axes)
    check(layer, x)


@pytest.mark.parametrize("ratio", [0.1, 1e-30])
def test_rows_so_long_or_short_that_their_squares_overflow_or_vanish(ratio):
    """The squares of a query are summed in two blocks of channels, the larger ones last."""
    layer = pa.ConditionedQuery(eps=0)
    x = problem(layer, 18, d=20)
    x["k"] *= 1e-25
    x["q"] *= 1e25
    x["q"][..., :16] *= ratio
    x["q"][:, 3] = 0.0
    expected = layer(**doubled(x), backend="reference")
    with small_tiles():
        out = layer(**x, backend="triton")
    assert error(out, expected) < BOUNDS[torch.float32]


def test_keys_that_hardly_vary_around_a_long_mean():
    """The covariance is a difference of two large numbers."""
    layer = pa.ConditionedQuery()
    x = problem(layer, 40)
    x["k"] = 1e-2 * x["k"] + torch.randn(12)
    check(layer, x)


def test_the_query_of_the_first_token_is_not_contracted():
    layer = pa.ConditionedQuery(eps=0)
    x = problem(layer, 17)
    segments = torch.tensor([[0] * 16 + [1]])
    with small_tiles():
        out = layer(**x, segment_ids=segments, backend="triton")
    unit = x["q"] / x["q"].norm(dim=-1, keepdim=True)
    assert error(out[:, [0, 16]], unit[:, [0, 16]]) < 1e-6
