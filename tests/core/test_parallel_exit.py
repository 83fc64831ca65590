"""How a process that divides sequences ends: nothing keeps its groups."""

import gc
from contextlib import contextmanager
from weakref import ref

import pytest

pytest.importorskip("torch.distributed.tensor")  # PyTorch can be built without it.

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import precondattn as pa
from precondattn.parallel.torch import context_parallel, redistribute


@contextmanager
def one_process(folder):
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp"))
    finally:
        dist.destroy_process_group()


def called(folder, layout):
    """What a program may keep of calls, and its group and mesh."""
    with one_process(folder) as mesh:
        q, k, v = torch.randn(3, 1, 8, 2, 4).requires_grad_()
        attn = context_parallel("lucid", mesh["cp"], layout=layout)
        out = attn(q, k, v)
        out.sum().backward()
        kept = [out]
        if layout != "heads":
            read, cache = attn.prefill(q, k, v, capacity=9)
            with torch.no_grad():
                written, cache = attn.extend(cache, *(x[:, :1].detach() for x in (q, k, v)))
            kept += [read, written, redistribute(cache)]
        return kept, ref(mesh["cp"].get_group()), ref(mesh)


@pytest.mark.parametrize("layout", ["heads", "zigzag"])
def test_nothing_keeps_a_group_that_the_program_has_destroyed(layout, tmp_path):
    q = torch.randn(1, 2, 2, 4).requires_grad_()
    pa.lucid(q, q, q)  # What PyTorch imports at a first call keeps the frames of that call.
    gc.disable()  # A program that exits does not collect cycles.
    try:
        kept, group, mesh = called(tmp_path, layout)
        assert group() is None
        assert mesh() is None
        assert kept[0].grad_fn is not None
    finally:
        gc.enable()


def test_a_call_after_the_groups_are_destroyed_says_so(tmp_path):
    with one_process(tmp_path) as mesh:
        attn = context_parallel("lucid", mesh["cp"])
    attn.mesh = mesh = None
    with pytest.raises(RuntimeError, match="the process group has been destroyed"):
        attn.processes.agree(None)
