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
from unittest.mock import patch

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

CYCLIC = "cyclic[block=2]"
RINGS = ("softmax", "softmax[causal=false]", "softmax[softcap=5,scale=0.3]", "laser")
"""Mechanisms whose keys go around a ring"""


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


def require_equal(found, expected, what):
    torch.testing.assert_close(
        found, expected, rtol=1e-10, atol=1e-10, msg=lambda m: f"{what}: {m}"
    )


def divided(expression, by, mesh, masks=(), times=None, bad=None, as_dtensor=False, block=None):
    """Output and gradients of a divided call are those of one process.

    The token `bad` of the first sequence has a key head that is NaN.
    """
    world, is_even = mesh.size(), by not in ("heads", "contiguous")
    layout = layout_of(world, **({"t": 6 * world, "s": 6 * world} if is_even else {}))
    m, x = whole(expression, layout)
    if bad is not None:
        x["k"][0, bad, 0] = math.nan
    x = {n: ((times or {}).get(n, 1) * a).requires_grad_() for n, a in x.items()}
    t, b = layout.t, layout.b
    masks = masks_of(masks, t, b)
    expected = m(**x, **masks)
    assert bool(expected.isnan().any()) == (bad is not None)
    cotangent = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).view_as(expected)
    of_all = torch.autograd.grad(expected, list(x.values()), cotangent)

    own = list(own_tokens(by, t, mesh))
    given = {n: at(a.detach(), m.inputs[n], own).clone().requires_grad_() for n, a in x.items()}
    own_masks = {n: a if n == "lengths" else a[:, own] for n, a in masks.items()}
    called = given
    if as_dtensor:
        called = {n: dtensor(a, x[n], m.inputs[n], mesh) for n, a in given.items()}
    with patch.object(solve_blocks, "BLOCK", block or solve_blocks.BLOCK):
        out = context_parallel(m, mesh, layout=by)(**called, **own_masks)
        if as_dtensor:
            assert (out.shape, out.placements) == (expected.shape, (Shard(1),))
            out = out.to_local()
        output = m.program.output
        gradients = torch.autograd.grad(out, list(given.values()), at(cotangent, output, own))
    true = at(expected, output, own)
    assert torch.equal(out.isnan(), true.isnan())
    require_equal(out.nan_to_num(), true.nan_to_num(), "the output")
    for (name, pattern), found, true in zip(m.inputs.items(), gradients, of_all, strict=True):
        if time_of(pattern) is None:
            found = found.clone()
            dist.all_reduce(found, group=mesh.get_group())
        scale = max(1.0, float(true.abs().max()))
        require_equal(found / scale, at(true, pattern, own) / scale, f"the gradient of {name}")
    if by in ("zigzag", CYCLIC):
        by_device = [expected[:, tokens_of(by, t, world, i)] for i in range(world)]
        by_device = torch.cat(by_device, 1)
        assert torch.equal(to_layout(expected, by, world), by_device)
        assert torch.equal(from_layout(by_device, by, world), expected)


def masks_of(names, t, b):
    """Two sequences: segments that cross processes, and one of them shorter.

    In the second sequence each segment ends a token earlier.
    """
    each = torch.arange(t) + torch.arange(b)[:, None]
    ends = torch.tensor([1, t // 2 + 1, t - 2, t])
    made = {
        "lengths": torch.tensor([t - 3, t // 3])[:b],
        "key_mask": torch.arange(b * t).view(b, t) % 5 != 1,
        "segment_ids": torch.bucketize(each, ends, right=True),
    }
    return {name: made[name] for name in names}


def dtensor(local, of_all, pattern, mesh):
    axis = time_of(pattern)
    placement = Replicate() if axis is None else Shard(axis)
    shape, stride = of_all.shape, of_all.stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)


def call_rows(world):
    """Rows (mechanism, layout, options of `divided`) of what the suite's divided cases lack."""
    for by in ("heads", "contiguous", "zigzag", CYCLIC):
        yield "lucid", by, {}
    yield "gated_delta", "contiguous", {}
    if world in (1, 8):
        return
    for text, by in (("lucid", "heads"), ("gated_delta", "contiguous"), ("deltaformer", "heads")):
        yield text, by, {"as_dtensor": True}
    far = {"q": 300, "v": 3000}  # Weights underflow, and values make up for it.
    yield "laser", "zigzag", {"times": far}
    for by in ("contiguous", "cyclic[block=3]"):  # Several blocks of each part.
        yield "lucid[beta=true]", by, {"masks": ("lengths", "segment_ids"), "block": 2}
    for text in ("kda", "gsa", "ccq(gla)", "atk"):
        yield text, "contiguous", {"masks": ("segment_ids",), "bad": 4}


FEW = (
    *((text, "contiguous", {"masks": ("lengths",)}) for text in ("gated_delta", "softmax", "path")),
    *(("lucid", by, {"masks": ("lengths", "segment_ids")}) for by in ("contiguous", "heads")),
    ("laser", "zigzag", {}),
    ("ccq(gla)", "contiguous", {"masks": ("segment_ids", "key_mask")}),
)
"""A row of each way of dividing a call"""


def named(rows, function):
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


def imports(world, folder, *parts):
    """The modules of the parts, and what DTensors import when they are first used."""
    names = [f"tests.core.{part.split(':')[0]}" for part in parts if ":" in part]
    return names if world in (1, 8) else [*names, "torch._dynamo"]


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
