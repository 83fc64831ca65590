"""Calls that several processes divide, as rows: a mechanism, a layout, and what is special.

`tests/ranks.py` starts the processes; each calls `main`, and writes `PART_RANK.json`: the names of
the cases of a part, and the error of each that failed.
"""

import json
import math
import traceback
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import precondattn as pa
from precondattn.parallel.layouts import from_layout, to_layout, tokens_of
from precondattn.parallel.torch import context_parallel, solve_blocks
from precondattn_conformance.inputs import CallLayout, make_inputs
from tests.representatives import SCANNED

SINGLE = {"dtype": torch.float32, "tolerance": 1e-5}
CYCLIC = "cyclic[block=2]"
HEADS = (
    *("softmax", "softmax[bias=true]", "softmax[forget=unscaled]", "lucid(path)", "differential"),
    *("deltaformer", "row_normalized", "temperature[per=head](linear)", "per_dim_scale", "elu1"),
    *("gsa", "ssd", "kda", "delta_product", "ccq(lucid)", "atk", "mesa", "hedgehog(gated_delta)"),
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
PACKED = (
    *("linear", "kda", "linear[normalize=true]", "mesa(ssd)", "gsa", "delta_product"),
    *("gated_delta", "comba", "dplr", "ccq(gated_delta)", "atk[learned=true](kda)"),
)
"""Recurrences of packed sequences; those of the first line have one sequence in a batch"""


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


def at(x, pattern, positions):
    """The tokens of an input at some positions; all of it if it has none."""
    axis = time_of(pattern)
    if axis is None:
        return x
    multiple = pattern.axes[axis].multiple
    rows = [p * multiple + i for p in positions for i in range(multiple)]
    return x.index_select(axis, torch.tensor(rows, dtype=torch.int64))


def of_tokens(m, x, positions):
    return {name: at(a, m.inputs[name], positions) for name, a in x.items()}


def own_tokens(by, tokens, mesh):
    """A process's positions: in turn, or in blocks of equal length but the last."""
    rank, world = mesh.get_local_rank(), mesh.size()
    if by not in (None, "heads", "contiguous"):
        return tokens_of(by, tokens, world, rank)
    each = -(-tokens // world)
    return range(rank * each, min((rank + 1) * each, tokens))


def part_of(expression, mesh, by="contiguous", **of):
    """A mechanism, and this process's part of its inputs."""
    layout = layout_of(mesh.size(), **of)
    m, x = whole(expression, layout)
    return m, of_tokens(m, x, own_tokens(by, layout.t, mesh))


def require_equal(found, expected, what, tolerance=1e-10):
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}"
    )


def divided(
    expression,
    by,
    mesh,
    masks=(),
    dtype=torch.float64,
    tolerance=1e-10,
    kind="clustered",
    times=None,
    bounds=None,
    bad=None,
    as_dtensor=False,
    block=None,
    **of,
):
    """Output and gradients of a divided call are those of one process.

    The token `bad` of the first sequence has a key head that is NaN.
    """
    world = mesh.size()
    if by not in (None, "heads", "contiguous"):
        of = {"t": 6 * world, "s": 6 * world, **of}
    layout = layout_of(world, **of)
    m, x = whole(expression, layout, kind)
    if bad is not None:
        x["k"][0, bad, 0] = math.nan
    x = {n: ((times or {}).get(n, 1) * a).to(dtype).requires_grad_() for n, a in x.items()}
    t, b = layout.t, layout.b
    masks = masks_of(masks, t, b, bounds)
    expected = m(**x, **masks)
    assert bool(expected.isnan().any()) == (bad is not None)
    cotangent = torch.linspace(-1, 1, expected.numel(), dtype=dtype).view_as(expected)
    of_all = torch.autograd.grad(expected, list(x.values()), cotangent)

    own = list(own_tokens(by, t, mesh))
    given = {n: at(a.detach(), m.inputs[n], own).clone().requires_grad_() for n, a in x.items()}
    if {"lengths", "key_mask", "cu_seqlens"} & {*masks}:  # Nothing of padding is read.
        for name, a in given.items():
            axis, letters = time_of(m.inputs[name]), m.inputs[name].letters
            valid = visible(masks, t, b, keys="t" not in letters)[:, own]
            if axis is not None:
                with torch.no_grad():
                    a[~valid.repeat_interleave(a.shape[axis] // len(own), 1)] = math.nan
    before = {n: a.detach().clone() for n, a in given.items()}
    own_masks = {n: a if n in ("lengths", "cu_seqlens") else a[:, own] for n, a in masks.items()}
    called = given
    if as_dtensor:
        called = {n: dtensor(a, x[n], m.inputs[n], mesh) for n, a in given.items()}
    before_block = solve_blocks.BLOCK
    solve_blocks.BLOCK = block or before_block
    try:
        out = context_parallel(m, mesh, layout=by)(**called, **own_masks)
        if as_dtensor:
            assert (out.shape, out.placements) == (expected.shape, (Shard(1),))
            out = out.to_local()
        output = m.program.output
        d_out = at(cotangent, output, own)
        gradients = torch.autograd.grad(out, list(given.values()), d_out)
    finally:
        solve_blocks.BLOCK = before_block
    true = at(expected, output, own)
    assert torch.equal(out.isnan(), true.isnan())
    require_equal(out.nan_to_num(), true.nan_to_num(), "the output", tolerance)
    for (name, pattern), found, true in zip(m.inputs.items(), gradients, of_all, strict=True):
        if time_of(pattern) is None:
            found = found.clone()
            dist.all_reduce(found, group=mesh.get_group())
        scale = max(1.0, float(true.abs().max()))
        what = f"the gradient of {name}"
        require_equal(found / scale, at(true, pattern, own) / scale, what, tolerance)
        assert torch.equal(given[name].nan_to_num(), before[name].nan_to_num())
    if by in ("zigzag", CYCLIC):
        by_device = [expected[:, tokens_of(by, t, world, i)] for i in range(world)]
        by_device = torch.cat(by_device, 1)
        assert torch.equal(to_layout(expected, by, world), by_device)
        assert torch.equal(from_layout(by_device, by, world), expected)


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


def packed_rows(world):
    """Segments that end with a process, within one, and go over three; and masked keys."""
    t = 6 * world
    ends = ([6], [], [t - 7, t - 6], [6 * i + 2 for i in range(world)])
    for i, expression in enumerate(PACKED):
        b = 1 if i < 6 else 2
        masks = (
            "cu_seqlens" if b == 1 else "segment_ids",
            *(("lengths",), ("key_mask",), ())[i % 3],
        )
        bounds = [0, *ends[i % 4], t]
        yield expression, "contiguous", {"masks": masks, "bounds": bounds, "b": b, "t": t, "s": t}
    for expression in ("kda", "gsa", "ccq(gla)", "atk"):
        of = {"bounds": [0, 2, t - 4, t], "bad": 4, "t": t, "s": t}
        yield expression, "contiguous", {"masks": ("segment_ids",), **of}
    one = {"bounds": [0, world // 2, world], "t": world, "s": world}
    yield "ccq(gla)", "contiguous", {"masks": ("segment_ids",), **one}


def call_rows(world):
    """Rows (mechanism, layout, options of `divided`): all kinds with two processes."""
    odd, one_each = {"t": 7 * world + 1, "s": 7 * world + 1}, {"t": world, "s": world}
    if world in (1, 8):
        for by in ("heads", "contiguous", "zigzag", "cyclic[block=1]"):
            yield "lucid", by, {"t": 2 * world, "s": 2 * world}
        yield "gated_delta", "contiguous", {}
        yield "softmax", "contiguous", {}
        return
    yield from ((text, "heads", {}) for text in HEADS[:: 1 if world == 2 else 4])
    few = ("lucid", "gated_delta", "softmax[bias=true]")
    key_heads = {2: (4, 1), 3: (6, 1), 4: (8, 2)}[world]
    for text, of in zip(few, ({"heads": key_heads}, one_each, SINGLE), strict=True):
        yield text, "heads", of
        yield text, "heads", {"as_dtensor": True}
    yield "gated_delta", "contiguous", {"as_dtensor": True}
    yield "deltaformer", "heads", {"as_dtensor": True}
    yield "lucid", "heads", {"heads": (2 * world, 1), "t": 2 * world, "s": 2 * world}
    yield "retention", None, {"heads": (2 * world, 2 * world)}
    yield "lucid", None, {"heads": (2 * world - 1, 2 * world - 1)}
    for mask in ("lengths", "key_mask", "segment_ids"):
        for text, by in (("lucid", "heads"), ("path", "contiguous")):
            yield text, by, {"masks": (mask,)}
    for i, text in enumerate(SCANNED[:: 1 if world == 2 else 3]):
        masks = ((), ("lengths",), (), ("key_mask", "lengths"))[i % 4]
        yield text, "contiguous", {"masks": masks}
    yield from ((text, "contiguous", {}) for text in (*RINGS, *GATHERED))
    yield from ((text, "zigzag", {}) for text in (*RINGS, "path", "lucid"))
    for text in SOLVES:
        by = "contiguous" if "linear" in text else CYCLIC
        yield text, by, {} if by == "contiguous" else odd
    yield "path", CYCLIC, {}
    yield "softmax", CYCLIC, odd
    for text in ("softmax", "softmax[causal=false]", "laser", "lucid[beta=true]"):
        for i, masks in enumerate((("lengths",), ("key_mask",), ("segment_ids",))):
            yield text, ("contiguous", CYCLIC)[(i + world) % 2], {"masks": masks}
        yield text, CYCLIC, {"masks": ("lengths", "segment_ids")}
    packed = {"masks": ("cu_seqlens",), "b": 1, "bounds": [0, 1, 3 * world + 1, 6 * world - 4]}
    for text, by in (("lucid", CYCLIC), ("gated_delta", "contiguous")):
        yield text, by, {**packed, "t": 6 * world, "s": 6 * world}
    yield "lucid", "zigzag", SINGLE
    yield "softmax", "contiguous", {**SINGLE, **one_each, "heads": (3, 1)}
    yield "gla", "contiguous", SINGLE
    far = {"q": 300, "v": 3000}  # Weights underflow, and values make up for it.
    yield "laser", "zigzag", {"times": far}
    yield "lucid", CYCLIC, {"kind": "duplicate"}
    for by in ("contiguous", "cyclic[block=3]"):  # Several blocks of each part.
        of = {"masks": ("lengths", "segment_ids"), "block": 2, "t": 6 * world, "s": 6 * world}
        yield "lucid[beta=true]", by, of
    yield from list(packed_rows(world))[world % 2 :: 1 if world == 3 else 2]


FEW = (
    *((text, "contiguous", {"masks": ("lengths",)}) for text in ("gated_delta", "softmax", "path")),
    *(("lucid", by, {"masks": ("lengths", "segment_ids")}) for by in ("contiguous", "heads")),
    ("laser", "zigzag", {}),
    ("ccq(gla)", "contiguous", {"masks": ("segment_ids", "key_mask")}),
)
"""A row of each way of dividing a call"""


def named(rows, function, world=2):
    """The names of rows, and the cases, which take a mesh."""
    for text, by, options in rows:
        said = ", ".join(f"{k}={v}" for k, v in options.items())
        yield f"{text}, {by}: {said}", partial(_case, function, text, by, options)


def _case(function, text, by, options, mesh):
    function(text, by, mesh, **options)


def cases(world):
    yield from named(call_rows(world), divided)


def few(world):
    yield from named(FEW, divided)


def main(rank, world, folder, *parts):
    """The cases of some parts: "module:function" yields names and functions of a mesh."""
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))["cp"]
    if parts == ("ends",):  # A call that only one process makes.
        if rank == 0:
            context_parallel("lucid", mesh)(**whole("lucid", layout_of(world))[1])
        return
    for part in parts:
        module, name = part.split(":")
        results = {}
        for case, function in getattr(import_module(f"tests.core.{module}"), name)(world):
            assert case not in results, case
            try:
                function(mesh)
                results[case] = None
            except Exception:
                results[case] = traceback.format_exc(limit=-6)
        (Path(folder) / f"{part}_{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
