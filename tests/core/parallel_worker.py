"""Several processes divide sequences. `tests/ranks.py` starts them; each calls `main`.

A process writes `result_RANK.json`: the names of its cases, and the error of each that failed.
"""

import json
import math
import traceback
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import precondattn as pa
from precondattn.parallel import ring_reads
from precondattn.parallel.layouts import from_layout, to_layout, tokens_of
from precondattn.parallel.torch import context_parallel, solve, solve_blocks
from precondattn_conformance.inputs import CallLayout, make_inputs
from tests.representatives import SCANNED

MECHANISMS = (
    *("softmax", "softmax[bias=true]", "softmax[causal=false]", "softmax[forget=unscaled]"),
    *("lucid", "lucid[beta=true]", "lucid(path)", "laser", "path", "differential"),
    *("deltaformer", "row_normalized", "temperature[per=head](linear)", "per_dim_scale", "elu1"),
    *("linear", "gla", "gsa", "ssd", "delta", "gated_delta", "kda", "comba", "delta_product"),
    *("ccq(gla)", "ccq(lucid)", "atk", "mesa", "hedgehog(gated_delta)"),
    *("cross_covariance", "lucid(softmax[causal=false])"),
    "softmax[causal=false,distance=buckets]",
)
SOLVES = (
    *("lucid", "lucid[beta=true]", "lucid[normalize=none]", "qk_norm(lucid)"),
    *("lucid[normalize=queries_and_keys,beta=true]", "differential", "elu1(linear)"),
    *("temperature[per=head](lucid)", "lucid(laser)"),
)
"""Compositions whose leaves are divided one by one"""
RINGS = ("softmax", "softmax[causal=false]", "softmax[softcap=5,scale=0.3]", "laser")
"""Mechanisms whose keys go around a ring"""
GATHERED = (
    *("path", "path[window=3]", "path[forget=unscaled]", "softmax[window=3]"),
    *("softmax[forget=unscaled]", "softmax[sink=true]", "qk_norm(path)"),
    *("softmax[distance=slopes]", "softmax[distance=buckets]"),
)
"""Mechanisms whose keys all processes gather"""
FEW = ("lucid", "gated_delta", "softmax[bias=true]")
"""Mechanisms that are also tested with other numbers of heads and tokens, and other options"""


def layout_of(world, **changed):
    """An odd number of tokens, of which the last process has fewer."""
    heads = {1: (2, 1), 2: (4, 2), 3: (6, 3), 4: (4, 4), 8: (8, 8)}[world]
    h, n = changed.pop("heads", heads)
    return CallLayout("test", t=5 * world - 1, s=5 * world - 1, h=h, n=n)._replace(**changed)


def whole(expression, layout, kind="clustered"):
    m = pa.parse(expression)
    return m, {n: torch.tensor(a) for n, a in make_inputs(m, layout, kind).items()}


def time_of(pattern):
    letters = [axis.letter for axis in pattern.axes]
    return next((letters.index(letter) for letter in "ts" if letter in letters), None)


def part_of(x, pattern, rank, world):
    """A process's tokens, of blocks of equal length but the last."""
    axis = time_of(pattern)
    if axis is None:
        return x
    multiple = pattern.axes[axis].multiple
    each = -(-(x.shape[axis] // multiple) // world) * multiple
    return x.narrow(axis, rank * each, min(each, x.shape[axis] - rank * each))


def require_equal(found, expected, what, tolerance=1e-10):
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}"
    )


def check(
    expression,
    mesh,
    layout,
    dtype=torch.float64,
    tolerance=1e-10,
    mask=None,
    as_dtensor=0,
    by="heads",
):
    rank, world = mesh.get_local_rank(), mesh.size()
    m, x = whole(expression, layout)
    x = {n: a.to(dtype).requires_grad_() for n, a in x.items()}
    masks = {n: torch.as_tensor(a) for n, a in layout._replace(mask=mask).masks().items()}
    expected = m(**x, **masks)
    cotangent = torch.linspace(-1, 1, expected.numel(), dtype=dtype).view_as(expected)
    of_all = torch.autograd.grad(expected, list(x.values()), cotangent)

    given = {
        n: part_of(a.detach(), m.inputs[n], rank, world).clone().requires_grad_()
        for n, a in x.items()
    }
    before = {n: a.detach().clone() for n, a in given.items()}
    of_tokens = {n: a if n == "lengths" else a.chunk(world, 1)[rank] for n, a in masks.items()}
    called = dict(given)
    if as_dtensor:
        called = {n: dtensor(a, x[n], m.inputs[n], mesh) for n, a in given.items()}
    attn = context_parallel(m, mesh, layout=by)
    out = attn(**called, **of_tokens)
    if as_dtensor:
        assert out.shape == expected.shape
        assert out.placements == (Shard(1),)
        out = out.to_local()
    output = m.program.output
    require_equal(out, part_of(expected, output, rank, world), "the output", tolerance)
    d_out = part_of(cotangent, output, rank, world)
    gradients = torch.autograd.grad(out, list(given.values()), d_out)
    for (name, pattern), found, true in zip(m.inputs.items(), gradients, of_all, strict=True):
        if time_of(pattern) is None:
            found = found.clone()
            dist.all_reduce(found)
        true = part_of(true, pattern, rank, world)
        scale = max(1.0, float(true.abs().max()))
        require_equal(found / scale, true / scale, f"the gradient of {name}", tolerance)
        assert torch.equal(given[name], before[name])


def in_order(
    expression,
    mesh,
    layout,
    masks=(),
    dtype=torch.float64,
    tolerance=1e-10,
    kind="clustered",
    times=None,
    bounds=None,
    bad=None,
    **of,
):
    """Tokens in the order of a layout, and the output and gradients in the same.

    The token `bad` of the first sequence has a key head that is NaN.
    """
    rank, world = mesh.get_local_rank(), mesh.size()
    of = {"t": 6 * world, "s": 6 * world, **of}
    m, x = whole(expression, layout_of(world, **of), kind)
    if bad is not None:
        x["k"][0, bad, 0] = math.nan
    x = {n: ((times or {}).get(n, 1) * a).to(dtype).requires_grad_() for n, a in x.items()}
    b = x["k"].shape[0]
    masks = masks_of(masks, of["t"], b, bounds)
    expected = m(**x, **masks)
    assert bool(expected.isnan().any()) == (bad is not None)
    cotangent = torch.linspace(-1, 1, expected.numel(), dtype=dtype).view_as(expected)
    of_all = torch.autograd.grad(expected, list(x.values()), cotangent)
    own = tokens_of(layout, of["t"], world, rank)

    def part(a, pattern):
        axis = time_of(pattern)
        if axis is None:
            return a.detach().clone()
        each = range(pattern.axes[axis].multiple)
        return a.detach()[:, [len(each) * token + i for token in own for i in each]].clone()

    given = {n: part(a, m.inputs[n]).requires_grad_() for n, a in x.items()}
    if {"lengths", "key_mask", "cu_seqlens"} & {*masks}:  # Nothing of padding is read.
        for name, a in given.items():
            letters = m.inputs[name].letters
            valid = visible(masks, of["t"], b, keys="t" not in letters)[:, own]
            if time_of(m.inputs[name]) is not None:
                with torch.no_grad():
                    a[~valid.repeat_interleave(a.shape[1] // len(own), 1)] = math.nan
    of_tokens = {n: a if n in ("lengths", "cu_seqlens") else a[:, own] for n, a in masks.items()}
    out = context_parallel(m, mesh, layout=layout)(**given, **of_tokens)
    true = part(expected, m.program.output)
    assert torch.equal(out.isnan(), true.isnan())
    require_equal(out.nan_to_num(), true.nan_to_num(), "the output", tolerance)
    gradients = torch.autograd.grad(out, list(given.values()), part(cotangent, m.program.output))
    for (name, pattern), found, true in zip(m.inputs.items(), gradients, of_all, strict=True):
        if time_of(pattern) is None:
            found = found.clone()
            dist.all_reduce(found)
        scale = max(1.0, float(true.abs().max()))
        what = f"the gradient of {name}"
        require_equal(found / scale, part(true, pattern) / scale, what, tolerance)
    by_device = torch.cat(
        [expected[:, tokens_of(layout, of["t"], world, i)] for i in range(world)], 1
    )
    assert torch.equal(to_layout(expected, layout, world).nan_to_num(), by_device.nan_to_num())
    assert torch.equal(from_layout(by_device, layout, world), expected) or bad is not None


def masks_of(names, t, b, bounds=None):
    """One or two sequences: segments that cross processes, and one of them shorter.

    In the second sequence each segment ends a token earlier.
    """
    bounds = bounds or [0, 1, t // 2 + 1, t - 2, t]
    each = torch.arange(t) + torch.arange(b)[:, None]
    made = {
        "lengths": torch.tensor([t - 3, t // 3])[:b],
        "key_mask": torch.arange(b * t).view(b, t) % 5 != 1,
        "segment_ids": torch.bucketize(each, torch.tensor(bounds[1:]), right=True),
        "cu_seqlens": torch.tensor(bounds),  # int64, as those of `cumsum`
    }
    return {name: made[name] for name in names}


def visible(masks, t, b, *, keys):
    """The tokens that are not padding, or, of keys, that a key mask hides."""
    valid = torch.ones(b, t, dtype=torch.bool)
    if keys and "key_mask" in masks:
        valid = masks["key_mask"]
    if "cu_seqlens" in masks:
        valid = valid & (torch.arange(t) < masks["cu_seqlens"][-1])
    return valid & (torch.arange(t) < masks["lengths"][:, None]) if "lengths" in masks else valid


def dtensor(local, of_all, pattern, mesh):
    axis = time_of(pattern)
    placement = Replicate() if axis is None else Shard(axis)
    shape, stride = of_all.shape, of_all.stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)


def bytes_are_counted(mesh):
    """What `explain` says is what is sent, and the gradient sends as much in all."""
    rank, world = mesh.get_local_rank(), mesh.size()
    asked = [(e, {"heads": heads}, "heads") for e in FEW for heads in ((8, 8), (8, 2), (8, 1))]
    asked += [(e, {}, "contiguous") for e in ("linear", "gla", "gated_delta", *RINGS)]
    asked += [
        ("elu1(linear)", {}, "contiguous"),
        ("ccq(gla)", {}, "contiguous"),
        ("differential", {}, "zigzag"),
    ]
    asked += [("lucid", {}, by) for by in ("contiguous", "cyclic[block=2]")]
    for expression, sizes, by in asked:
        m, x = whole(expression, layout_of(world, t=16, s=16, **sizes))
        given = {
            n: part_of(a, m.inputs[n], rank, world).clone().requires_grad_() for n, a in x.items()
        }
        attn = context_parallel(m, mesh, layout=by)
        plan = attn.explain(**given)
        with sent_bytes() as sent:
            out = attn(**given)
            forward = sum(sent)
            out.sum().backward()
        assert forward == sum(plan.bytes_sent.values()), (expression, sizes, by)
        everyone = [None] * world
        dist.all_gather_object(everyone, (forward, sum(sent) - forward))
        if expression not in (*RINGS, "differential", "lucid"):  # Gradients go beside keys.
            assert sum(a for a, _ in everyone) == sum(b for _, b in everyone)
        assert f"{forward:,} bytes sent" in str(plan)


@contextmanager
def sent_bytes():
    """What this process sends meanwhile, of inputs, outputs and states."""
    sent, exchange, pass_on = [], dist.all_to_all_single, dist.batch_isend_irecv
    give, gather = dist.broadcast, dist.all_gather_into_tensor

    def exchanging(result, buffer, received, given, group):
        sent.append(sum(given))
        return exchange(result, buffer, received, given, group=group)

    def passing(operations):
        sent.extend(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return pass_on(operations)

    def gathering(result, x, group):
        sent.append(x.nbytes * (dist.get_world_size(group) - 1))
        return gather(result, x, group=group)

    def giving(x, source, group, async_op=False):
        if source == dist.get_rank():
            sent.append(x.nbytes * (dist.get_world_size(group) - 1))
        return give(x, source, group=group, async_op=async_op)

    dist.all_to_all_single, dist.batch_isend_irecv = exchanging, passing
    dist.broadcast, dist.all_gather_into_tensor = giving, gathering
    try:
        yield sent
    finally:
        dist.all_to_all_single, dist.batch_isend_irecv = exchange, pass_on
        dist.broadcast, dist.all_gather_into_tensor = give, gather


def require_refused(
    mesh, words, expression="lucid", kind=ValueError, on=None, masks=None, by="heads", **changed
):
    """On all processes alike; `changed` on one of them, or on all."""
    rank, world = mesh.get_local_rank(), mesh.size()
    m, x = whole(expression, layout_of(world))
    given = {n: part_of(a, m.inputs[n], rank, world) for n, a in x.items()}
    if on is None or rank == on:
        given |= {n: change(given[n]) for n, change in changed.items()}
    with pytest.raises(kind) as raised:
        context_parallel(m, mesh, layout=by)(**given, **(masks or {}))
    assert all(word in str(raised.value) for word in words), str(raised.value)
    everyone = [None] * world
    dist.all_gather_object(everyone, str(raised.value))
    assert len(set(everyone)) == 1, everyone


def chosen_by_default(mesh):
    """Heads where the processes divide them; else tokens; else the reasons of both."""
    world = mesh.size()
    attn = context_parallel("lucid", mesh)
    for h, layout in ((2 * world, "heads"), (2 * world - 1, "contiguous")):
        q, k, v = torch.ones(3, 1, 4, h, 2)
        assert attn.explain(q, k, v).layout == layout
        assert attn.refusal(q, k, v) is None
    x = torch.ones(3, 1, 4, 2 * world - 1, 2)
    reason = context_parallel("deltaformer", mesh).refusal(*x, beta=x[0, ..., 0])
    assert reason is not None
    assert "layout 'heads' expects" in reason
    assert "layout 'contiguous' has no way to divide the tokens of deltaformer" in reason


def refusals(mesh):
    world, h = mesh.size(), layout_of(mesh.size()).h
    refused = {
        "one process has other heads": lambda: require_refused(
            mesh, ("all processes must call the same", "process 1"), on=1, q=lambda q: q[:, :, :1]
        ),
        "one process has another dtype": lambda: require_refused(
            mesh, ("all processes must call the same", "float32"), on=1, v=lambda v: v.float()
        ),
        "one process calls another mechanism": lambda: require_other_mechanism(mesh),
        "one process has a list": lambda: require_refused(
            mesh,
            ("process 1: k must be a tensor; found list",),
            kind=TypeError,
            on=1,
            k=lambda k: k.tolist(),
        ),
        "one process has fewer keys than values": lambda: require_refused(
            mesh, ("process 1: v has", "tokens, and k has"), on=1, k=lambda k: k[:, 1:]
        ),
        "one process has no token": lambda: require_refused(
            mesh,
            ("every process must have a token",),
            on=1,
            **dict.fromkeys("qkv", lambda a: a[:, :0]),
        ),
        "heads that can not be divided": lambda: require_refused(
            mesh,
            (f"{world} devices divide the number of heads of the output; found h={h - 1}",),
            **dict.fromkeys("qkv", lambda a: a[:, :, :1].expand(-1, -1, h - 1, -1)),
        ),
        "heads that depend on their number": lambda: require_refused(
            mesh, ("retention", "depends on its number"), "retention"
        ),
        "an input too many": lambda: require_refused_input(mesh),
        "an error of the call": lambda: require_refused(
            mesh, ("lengths",), masks={"lengths": torch.tensor([1, 2, 3])}
        ),
        "a mask that is not one of tokens": lambda: require_refused(
            mesh,
            ("key_mask has 1 tokens, and",),
            masks={"key_mask": torch.ones(2, 1, dtype=torch.bool)},
        ),
        "mixed": lambda: require_refused(
            mesh,
            ("must all be DTensors, or none", "k is a DTensor"),
            kind=TypeError,
            k=lambda k: DTensor.from_local(k, mesh, [Shard(1)]),
        ),
        "a DTensor of heads": lambda: require_refused(
            mesh,
            ("q must be S(1)",),
            **dict.fromkeys("qkv", lambda a: DTensor.from_local(a, mesh, [Shard(2)])),
        ),
        "states that are not those of one recurrence": lambda: require_refused(
            mesh,
            ("no way to divide the tokens of deltaformer;",),
            "deltaformer",
            by="contiguous",
        ),
        "a bias": lambda: require_refused(
            mesh, ("bias of softmax[bias=true] is of pairs",), "softmax[bias=true]", by="contiguous"
        ),
        "distances without causality": lambda: require_refused(
            mesh,
            ("gathers the keys before a query", "is not causal; use the layout 'heads'"),
            "softmax[causal=false,distance=slopes]",
            by="contiguous",
        ),
        "lengths that differ": lambda: require_refused(
            mesh,
            ("must call the same", "lengths [9, 3]"),
            masks={"lengths": [9, 3 + mesh.get_local_rank()]},
        ),
        "masks of another dtype": lambda: require_refused(
            mesh,
            ("must call the same", "segment_ids int32"),
            masks={
                "segment_ids": torch.zeros(
                    2,
                    5 - mesh.get_local_rank(),
                    dtype=torch.int64 if mesh.get_local_rank() else torch.int32,
                )
            },
        ),
        "lengths beyond the tokens": lambda: require_refused(
            mesh, ("lengths must be in 0 .",), "gla", by="contiguous", masks={"lengths": [59, -7]}
        ),
        "an error in a ring": lambda: require_error_of_all(mesh, "softmax", ring_reads, "with_lse"),
        "an error in a ring backward": lambda: require_error_of_all(
            mesh, "softmax", ring_reads, "part_vjp"
        ),
        "an error in a solve": lambda: require_error_of_all(mesh, "lucid", solve, "with_lse"),
        "an error in a solve backward": lambda: require_error_of_all(
            mesh, "lucid", solve, "part_vjp", on=0
        ),
        "an odd number of tokens in two parts": lambda: require_refused(
            mesh, ("expects two equal parts of tokens",), "softmax", by="zigzag"
        ),
        "a zigzag of states": lambda: require_refused(
            mesh,
            ("not consecutive, as gla needs them",),
            "gla",
            by="zigzag",
        ),
        "states of segments that come again": lambda: require_refused(
            mesh,
            ("segment_ids must be contiguous",),
            "gla",
            by="contiguous",
            masks={
                "segment_ids": (torch.arange(5 - mesh.get_local_rank()) > 1).expand(2, -1).int()
            },
        ),
        "an order that has other numbers": lambda: require_refused(
            mesh, ("expects 6, 3 tokens on the processes; found 5, 4",), by="cyclic[block=3]"
        ),
        "a solve without a metric of its own": lambda: require_refused(
            mesh, ("divides solves of dot products",), "lucid(path)", by="contiguous"
        ),
        "a solve with a window": lambda: require_refused(
            mesh, ("without a window",), "lucid(softmax[window=3])", by="contiguous"
        ),
        "a layout that is none": lambda: require_no_plan(
            ValueError,
            "'zigzag' or 'cyclic\\[block=512\\]'; found 'ring'",
            "lucid",
            mesh,
            layout="ring",
        ),
        "a mesh that is none": lambda: require_no_plan(
            TypeError, "a DeviceMesh, such as mesh\\['cp'\\]; found int", "lucid", world
        ),
    }
    return {f"refused: {name}": call for name, call in refused.items()}


def require_error_of_all(mesh, expression, module, name, on=1):
    """A process that has an error takes part in all exchanges, and then all raise it."""
    rank, world = mesh.get_local_rank(), mesh.size()
    m, x = whole(expression, layout_of(world))
    given = [part_of(a, m.inputs[n], rank, world).requires_grad_() for n, a in x.items()]
    function = getattr(module, name)

    def failing(*arguments, **options):
        raise ValueError("out of memory")

    call = context_parallel(m, mesh, layout="contiguous")
    out = call(*given) if name.endswith("vjp") else None
    setattr(module, name, failing if rank == on else function)
    try:
        with pytest.raises(ValueError, match=f"process {on}: out of memory"):
            call(*given) if out is None else out.sum().backward()
    finally:
        setattr(module, name, function)


def require_other_mechanism(mesh):
    rank, world = mesh.get_local_rank(), mesh.size()
    m, x = whole("lucid", layout_of(world))
    given = {n: part_of(a, m.inputs[n], rank, world) for n, a in x.items()}
    with pytest.raises(ValueError, match="must call the same; found on process 0 lucid in layout"):
        context_parallel("softmax" if rank else "lucid", mesh)(**given)


def require_refused_input(mesh):
    m, x = whole("lucid", layout_of(mesh.size()))
    with pytest.raises(TypeError, match="process 0: lucid: unknown keyword 'beta'"):
        context_parallel(m, mesh)(**x, beta=x["q"][..., 0])


def require_no_plan(kind, words, *arguments, **options):
    with pytest.raises(kind, match=words):
        context_parallel(*arguments, **options)


def two_dimensions(world):
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "cp"))
    require_no_plan(ValueError, "one dimension, such as mesh\\['cp'\\]; found 2", "lucid", mesh)
    check("lucid", mesh["cp"], layout_of(2))


def a_second_derivative(mesh):
    m, x = whole("lucid", layout_of(mesh.size()))
    given = {
        n: part_of(a, m.inputs[n], mesh.get_local_rank(), mesh.size()).clone().requires_grad_()
        for n, a in x.items()
    }
    out = context_parallel("lucid", mesh)(**given)
    (d_q,) = torch.autograd.grad(out.sum(), [given["q"]], create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        d_q.sum().backward()


def in_bfloat16(mesh):
    """The numbers of one process, to the bit: only heads are divided."""
    m, x = whole("gated_delta", layout_of(2))
    x = {n: a.to(torch.bfloat16) for n, a in x.items()}
    parts = {n: part_of(a, m.inputs[n], mesh.get_local_rank(), 2) for n, a in x.items()}
    expected = part_of(m(**x), m.program.output, mesh.get_local_rank(), 2)
    torch.testing.assert_close(context_parallel(m, mesh)(**parts), expected, rtol=0, atol=0)


def parts_in_bfloat16(mesh, expression, layout):
    """As near as one process, whose sums are in float32 too."""
    rank, world = mesh.get_local_rank(), mesh.size()
    m, x = whole(expression, layout_of(world, t=6 * world, s=6 * world))
    half = {n: a.to(torch.bfloat16) for n, a in x.items()}
    own = tokens_of(layout, 6 * world, world, rank)
    exact = m(**{n: a.double() for n, a in half.items()})[:, own]
    out = context_parallel(m, mesh, layout=layout)(**{n: a[:, own] for n, a in half.items()})

    def error(found):
        return float((found - exact).abs().max() / exact.abs().max())

    assert out.dtype == torch.bfloat16
    assert error(out) < 1.5 * error(m(**half)[:, own]) + 2**-9


def in_small_blocks(mesh):
    """Several blocks of each part, with segments that end in one."""
    block, solve_blocks.BLOCK = solve_blocks.BLOCK, 2
    try:
        for layout in ("contiguous", "cyclic[block=3]"):
            in_order("lucid[beta=true]", mesh, layout, ("lengths", "segment_ids"))
    finally:
        solve_blocks.BLOCK = block


PACKED = {
    1: ("linear", "kda", "linear[normalize=true]", "mesa(ssd)", "gsa", "delta_product"),
    2: ("gated_delta", "comba", "dplr", "ccq(gated_delta)", "atk[learned=true](kda)"),
}
"""Recurrences of packed sequences, by the number of their sequences"""


def packed_states(mesh):
    """Segments that end with a process, within one, and go over three; and masked keys."""
    world = mesh.size()
    t = 6 * world
    ends = {
        "one that ends with a process": [6],
        "one for all": [],
        "two, and one of one token": [6 * world - 7, 6 * world - 6],
        "one in each process": [6 * i + 2 for i in range(world)],
    }

    def packed(expression, given, bounds, b, **of):
        in_order(expression, mesh, "contiguous", given, b=b, bounds=bounds, **of)

    for b, expressions in PACKED.items():
        for i, expression in enumerate(expressions):
            name, bounds = list(ends.items())[i % len(ends)]
            segments = "cu_seqlens" if b == 1 else "segment_ids"
            more = (("lengths",), ("key_mask",), ())[i % 3]
            given = (segments, *more)
            yield (
                f"{expression}, states, {' and '.join(given)}: {name}",
                lambda e=expression, g=given, c=bounds, n=b: packed(e, g, [0, *c, t], n),
            )
    for expression in ("kda", "gsa", "ccq(gla)", "atk"):
        yield (
            f"{expression}, states, segment_ids: NaN in one of them",
            lambda e=expression: packed(e, ("segment_ids",), [0, 2, t - 4, t], 2, bad=4),
        )
    yield (
        "ccq(gla), states, segment_ids: one token on each process",
        lambda: in_order(
            *("ccq(gla)", mesh, "contiguous", ("segment_ids",)),
            bounds=[0, world // 2, world],
            t=world,
            s=world,
        ),
    )
    for expression in ("retention", "mesa", "ccq(gla)", "gated_delta"):
        yield (
            f"{expression}, states, key_mask",
            lambda e=expression: in_order(e, mesh, "contiguous", ("key_mask", "lengths")),
        )


def orders(mesh):
    """Leaf by leaf, with masks, in all orders of tokens."""
    world = mesh.size()
    t = 7 * world + 1
    cyclic = "cyclic[block=2]"
    for expression in SOLVES:
        layout = "contiguous" if "linear" in expression else cyclic
        sizes = {"t": 6 * world, "s": 6 * world} if layout == "contiguous" else {"t": t, "s": t}
        yield (
            f"{expression}, {layout}",
            lambda e=expression, b=layout, s=sizes: in_order(e, mesh, b, **s),
        )
    for layout in ("contiguous", "zigzag"):
        yield f"lucid, {layout}", lambda b=layout: in_order("lucid", mesh, b)
    yield "softmax, cyclic", lambda: in_order("softmax", mesh, cyclic, t=t, s=t)
    masks = (("lengths",), ("key_mask",), ("segment_ids",), ("lengths", "segment_ids"))
    for expression in ("softmax", "softmax[causal=false]", "laser", "lucid[beta=true]"):
        for given in masks:
            for layout in ("contiguous", cyclic):
                yield (
                    f"{expression}, {layout}, {' and '.join(given)}",
                    lambda e=expression, b=layout, g=given: in_order(e, mesh, b, g),
                )
    bounds = [0, 1, 3 * world + 1, 6 * world - 4]
    for expression, layout in (("lucid", cyclic), ("gated_delta", "contiguous")):
        yield (
            f"{expression}, packed, with padding",
            lambda e=expression, b=layout: in_order(
                e, mesh, b, ("cu_seqlens",), b=1, bounds=bounds
            ),
        )
    yield (
        "lucid, float32",
        lambda: in_order("lucid", mesh, "zigzag", dtype=torch.float32, tolerance=1e-5),
    )
    far = {"q": 300, "v": 3000}  # Weights underflow, and values make up for it.
    yield "laser, far apart", lambda: in_order("laser", mesh, "zigzag", times=far)
    yield "lucid, small blocks", lambda: in_small_blocks(mesh)
    yield "lucid, equal keys", lambda: in_order("lucid", mesh, cyclic, kind="duplicate")


def cases(mesh):
    world = mesh.size()
    if world == 1:
        for by, expression in (
            ("heads", "lucid"),
            ("contiguous", "softmax"),
            ("zigzag", "softmax"),
            ("cyclic[block=2]", "lucid"),
        ):
            few = layout_of(1, t=6, s=6)
            yield f"{expression}, {by}", lambda e=expression, k=by, c=few: check(e, mesh, c, by=k)
        yield (
            "gated_delta, contiguous",
            lambda: check("gated_delta", mesh, layout_of(1), by="contiguous"),
        )
        return
    if world == 8:
        for expression in FEW[:2]:
            yield f"{expression}, plain", lambda e=expression: check(e, mesh, layout_of(8))
        for expression in ("gated_delta", "softmax"):
            yield (
                f"{expression}, contiguous",
                lambda e=expression: check(e, mesh, layout_of(8), by="contiguous"),
            )
        for layout in ("zigzag", "cyclic[block=1]"):
            yield f"lucid, {layout}", lambda b=layout: in_order("lucid", mesh, b, t=16, s=16)
        return
    for expression in MECHANISMS:
        yield f"{expression}, plain", lambda e=expression: check(e, mesh, layout_of(world))
    for expression in FEW:
        changes = {
            "one key head": {"heads": (2 * world, 1)},
            "even": {"t": 2 * world, "s": 2 * world},
            "one token each": {"t": world, "s": world},
        }
        if world == 4:
            changes["a key head for two processes"] = {"heads": (8, 2)}
        for name, changed in changes.items():
            if name == "one key head" and expression == "gated_delta":
                changed = {"heads": (2 * world, 2 * world)}
            yield (
                f"{expression}, {name}",
                lambda e=expression, c=changed: check(e, mesh, layout_of(world, **c)),
            )
        yield (
            f"{expression}, float32",
            lambda e=expression: check(e, mesh, layout_of(world), torch.float32, 1e-5),
        )
        yield (
            f"{expression}, as DTensors",
            lambda e=expression: check(e, mesh, layout_of(world), as_dtensor=1),
        )
    for expression in SCANNED:
        yield (
            f"{expression}, states",
            lambda e=expression: check(e, mesh, layout_of(world), by="contiguous"),
        )
    for expression in RINGS:
        yield (
            f"{expression}, ring",
            lambda e=expression: check(e, mesh, layout_of(world), by="contiguous"),
        )
    for expression in RINGS:
        yield f"{expression}, zigzag", lambda e=expression: in_order(e, mesh, "zigzag")
    for expression in GATHERED:
        yield (
            f"{expression}, gathered",
            lambda e=expression: check(e, mesh, layout_of(world), by="contiguous"),
        )
    for layout in ("zigzag", "cyclic[block=2]"):
        yield f"path, {layout}", lambda b=layout: in_order("path", mesh, b)
    for mask in ("lengths", "key_mask", "segment_ids"):
        yield (
            f"path, gathered, {mask}",
            lambda k=mask: check("path", mesh, layout_of(world), mask=k, by="contiguous"),
        )
    for expression, heads in (("retention", 2 * world), ("lucid", 2 * world - 1)):
        yield (
            f"{expression}, by default",
            lambda e=expression, h=heads: check(e, mesh, layout_of(world, heads=(h, h)), by=None),
        )
    yield "heads, by default", lambda: chosen_by_default(mesh)
    yield from orders(mesh)
    some = {2: slice(0, None, 3), 3: slice(1, None, 2), 4: slice(0, None, 2)}[world]
    yield from list(packed_states(mesh))[some]
    few = layout_of(world, t=world, s=world, heads=(3, 1))
    yield (
        "softmax, ring, float32",
        lambda: check("softmax", mesh, layout_of(world), torch.float32, 1e-5, by="contiguous"),
    )
    yield "softmax, ring, one token each", lambda: check("softmax", mesh, few, by="contiguous")
    for expression in ("gla", "gated_delta"):
        yield (
            f"{expression}, states, masked",
            lambda e=expression: check(e, mesh, layout_of(world), mask="lengths", by="contiguous"),
        )
        yield (
            f"{expression}, states, float32",
            lambda e=expression: check(
                e, mesh, layout_of(world), torch.float32, 1e-5, by="contiguous"
            ),
        )
    yield (
        "gated_delta, states, as DTensors",
        lambda: check("gated_delta", mesh, layout_of(world), as_dtensor=1, by="contiguous"),
    )
    for mask in ("lengths", "key_mask", "segment_ids"):
        yield (
            f"lucid, masked by {mask}",
            lambda k=mask: check("lucid", mesh, layout_of(world), mask=k),
        )
    if world in (2, 4):
        yield "bytes", lambda: bytes_are_counted(mesh)
    if world == 4:
        yield "two dimensions", lambda: two_dimensions(world)
    if world == 2:
        yield "a second derivative", lambda: a_second_derivative(mesh)
        yield "bfloat16", lambda: in_bfloat16(mesh)
        for expression in ("softmax", "laser", "lucid"):
            yield (
                f"{expression}, zigzag, bfloat16",
                lambda e=expression: parts_in_bfloat16(mesh, e, "zigzag"),
            )
        yield (
            "deltaformer, as DTensors",
            lambda: check("deltaformer", mesh, layout_of(world), as_dtensor=1),
        )
        yield from refusals(mesh).items()


def few_cases(mesh):
    """One case of each way of dividing a call."""
    world = mesh.size()
    for expression, by in (
        ("lucid", "heads"),
        ("gated_delta", "contiguous"),
        ("softmax", "contiguous"),
        ("path", "contiguous"),
        ("lucid", "contiguous"),
    ):
        yield (
            f"{expression}, {by}",
            lambda e=expression, k=by: check(e, mesh, layout_of(world), mask="lengths", by=k),
        )
    yield "laser, zigzag", lambda: in_order("laser", mesh, "zigzag")
    yield (
        "softmax, zigzag, bfloat16",
        lambda: parts_in_bfloat16(mesh, "softmax", "zigzag"),
    )
    yield from list(refusals(mesh).items())[::6]


def main(rank, world, folder, what="all"):
    """All cases; a few; or, if one process "ends", a call without it."""
    if what != "ends":
        run({"all": cases, "few": few_cases}[what], rank, world, folder)
        return
    started(rank, world, folder)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    x = whole("lucid", layout_of(world))[1]
    if rank == 0:
        context_parallel("lucid", mesh["cp"])(**x)


def run(cases, rank, world, folder):
    """All cases, with their errors."""
    started(rank, world, folder)
    mesh, results = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",)), {}
    for name, case in cases(mesh["cp"]):
        try:
            case()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
    (Path(folder) / f"result_{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def started(rank, world, folder):
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )
