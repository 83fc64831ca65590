"""Refusals of divided calls, which all processes raise alike, and what a call sends."""

from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from precondattn.parallel import ring_reads, solve
from precondattn.parallel.torch import context_parallel
from tests.core.parallel_worker import CYCLIC, divided, part_of


@contextmanager
def sent_bytes():
    """What this process sends meanwhile, of inputs, outputs and states."""
    sent = []

    def counted(name, size):
        function = getattr(dist, name)

        def call(*arguments, **options):
            sent.append(size(*arguments, **options))
            return function(*arguments, **options)

        return patch.object(dist, name, call)

    def to_others(x, *, group, group_src, **_):
        return x.nbytes * (dist.get_world_size(group) - 1) * (group_src == dist.get_rank(group))

    with (
        counted("all_to_all_single", lambda result, buffer, received, given, group: sum(given)),
        counted(
            "batch_isend_irecv",
            lambda ops: sum(op.tensor.nbytes for op in ops if op.op is dist.isend),
        ),
        counted("broadcast", to_others),
    ):
        yield sent


def bytes_are_counted(mesh):
    """A call sends what its layout has to, and the gradient of `heads` as much."""
    others = mesh.size() - 1
    for text, by, times in (
        ("lucid", "heads", {name: others / mesh.size() for name in ("q", "k", "v", "out")}),
        ("softmax", "contiguous", {"k": others, "v": others}),
        ("lucid", CYCLIC, {"k": 2 * others, "out": 2 * others}),  # y is as large as out.
    ):
        m, given = part_of(text, mesh, t=16, s=16, heads=(8, 8))
        given = {n: a.clone().requires_grad_() for n, a in given.items()}
        with sent_bytes() as sent:
            out = context_parallel(m, mesh, layout=by)(**given)
            forward = sum(sent)
            out.sum().backward()
        sizes = {name: x.nbytes for name, x in (given | {"out": out}).items()}
        assert forward == sum(count * sizes[name] for name, count in times.items()), (text, by)
        assert by != "heads" or sum(sent) == 2 * forward


def require_refused(mesh, kind, words, call):
    """A call raises the same error on all processes."""
    with pytest.raises(kind) as raised:
        call()
    words = (words,) if isinstance(words, str) else words
    assert all(each in str(raised.value) for each in words), str(raised.value)
    everyone = [None] * mesh.size()
    dist.all_gather_object(everyone, str(raised.value))
    assert len(set(everyone)) == 1, everyone


def refused(text, by, change, kind, words, mesh):
    """A call refused on all processes; `change(rank, inputs)` are other inputs and masks."""
    m, given = part_of(text, mesh)
    given |= change(mesh.get_local_rank(), given)
    require_refused(mesh, kind, words, lambda: context_parallel(m, mesh, layout=by)(**given))


def on_one(name, change, other=None):
    """A change of an input on process 1; `other` is a mask of process 0."""
    others = {} if other is None else {name: other}
    return lambda rank, x: {name: change(x.get(name))} if rank else others


def every_input(change):
    return lambda rank, x: {name: change(x[name]) for name in "qkv"}


def unchanged(rank, x):
    return {}


def pieces(rank, x):
    return {"segment_ids": (torch.arange(5 - rank) > 1).expand(2, -1).int()}


SAME = "must call the same"
PER_TOKEN = "contiguous"
REFUSED = [
    ("lucid", "heads", on_one("q", lambda q: q[:, :, :1]), (SAME, "process 1")),
    ("lucid", "heads", on_one("v", lambda v: v.float()), (SAME, "float32")),
    ("lucid", "heads", on_one("k", lambda k: k[:, 1:]), ("process 1: v has", "tokens, and k has")),
    ("lucid", "heads", on_one("lengths", lambda _: [9, 4], [9, 3]), (SAME, "lengths [9, 3]")),
    (
        *("lucid", "heads", every_input(lambda a: a[:, :, :1].expand(-1, -1, 3, -1))),
        "2 devices divide the number of heads of the output; found h=3",
    ),
    (
        *("lucid", "heads", lambda rank, x: {n: a[:, : 1 - rank] for n, a in x.items()}),
        "every process must have a token",
    ),
    ("retention", "heads", unchanged, ("retention", "depends on its number")),
    ("lucid", "heads", lambda *_: {"lengths": torch.tensor([1, 2, 3])}, "lengths"),
    (
        *("lucid", "heads", lambda *_: {"key_mask": torch.ones(2, 1, dtype=torch.bool)}),
        "key_mask has 1 tokens, and",
    ),
    ("deltaformer", PER_TOKEN, unchanged, "no way to divide the tokens of deltaformer;"),
    ("softmax[bias=true]", PER_TOKEN, unchanged, "bias of softmax[bias=true] is of pairs"),
    (
        *("softmax[causal=false,distance=slopes]", PER_TOKEN, unchanged),
        ("gathers the keys before a query", "is not causal; use the layout 'heads'"),
    ),
    ("gla", PER_TOKEN, lambda *_: {"lengths": [59, -7]}, "lengths must lie between 0"),
    ("softmax", "zigzag", unchanged, "expects two equal parts of tokens"),
    ("gla", "zigzag", unchanged, "not consecutive, as gla needs them"),
    ("gla", PER_TOKEN, pieces, "segment_ids must be contiguous"),
    ("lucid", "cyclic[block=3]", unchanged, "expects 6, 3 tokens on the processes; found 5, 4"),
    ("lucid(path)", PER_TOKEN, unchanged, "divides solves of dot products"),
    ("lucid(softmax[window=3])", PER_TOKEN, unchanged, "without a window"),
]
"""Of a call: mechanism, layout, change of its inputs, and words of the ValueError"""
REFUSED_TYPES = [
    ("lucid", "heads", on_one("k", lambda k: k.tolist()), "process 1: k must be a tensor; found l"),
    (
        *("lucid", "heads", lambda rank, x: {"beta": x["q"][..., 0]}),
        "process 0: lucid: unknown keyword 'beta'",
    ),
]


def refused_dtensors(mesh):
    def sharded(axis):
        return lambda a: DTensor.from_local(a, mesh, [Shard(axis)])

    mixed = ("must all be DTensors, or none", "k is a DTensor")
    refused("lucid", "heads", lambda _, x: {"k": sharded(1)(x["k"])}, TypeError, mixed, mesh)
    refused("lucid", "heads", every_input(sharded(2)), ValueError, "q must be S(1)", mesh)


def refused_plans(mesh):
    with pytest.raises(ValueError, match=r"'zigzag' or 'cyclic\[block=512\]'; found 'ring'"):
        context_parallel("lucid", mesh, layout="ring")
    with pytest.raises(TypeError, match=r"a DeviceMesh, such as mesh\['cp'\]; found int"):
        context_parallel("lucid", 2)
    _, given = part_of("lucid", mesh)
    other = "softmax" if mesh.get_local_rank() else "lucid"
    with pytest.raises(ValueError, match="must call the same; found on process 0 lucid in layout"):
        context_parallel(other, mesh)(**given)


def error_of_all(text, module, name, on, mesh):
    """A process that has an error takes part in all exchanges, and then all raise it."""
    m, given = part_of(text, mesh)
    given = [a.requires_grad_() for a in given.values()]
    call = context_parallel(m, mesh, layout="contiguous")
    out = call(*given) if name.endswith("vjp") else None
    error = ValueError("out of memory")
    failing = patch.object(module, name, side_effect=error)
    with (
        failing if mesh.get_local_rank() == on else nullcontext(),
        pytest.raises(ValueError, match=f"process {on}: out of memory"),
    ):
        call(*given) if out is None else out.sum().backward()


def chosen_by_default(mesh):
    """Heads where the processes divide them; else tokens; else the reasons of both."""
    world = mesh.size()
    attn = context_parallel("lucid", mesh)
    for h, layout in ((2 * world, "heads"), (2 * world - 1, "contiguous")):
        q, k, v = torch.ones(3, 1, 4, h, 2)
        assert attn.refusal(q, k, v) is None
        with patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
            attn(q, k, v)
        assert exchange.called == (layout == "heads")
    x = torch.ones(3, 1, 4, 2 * world - 1, 2)
    reason = context_parallel("deltaformer", mesh).refusal(*x, beta=x[0, ..., 0])
    assert "layout 'heads' expects" in reason
    assert "layout 'contiguous' has no way to divide the tokens of deltaformer" in reason


def two_dimensions(mesh):
    both = init_device_mesh("cpu", (mesh.size() // 2, 2), mesh_dim_names=("dp", "cp"))
    with pytest.raises(ValueError, match=r"one dimension, such as mesh\['cp'\]; found 2"):
        context_parallel("lucid", both)
    divided("lucid", "heads", both["cp"])


def a_second_derivative(mesh):
    m, given = part_of("lucid", mesh)
    given = {n: a.clone().requires_grad_() for n, a in given.items()}
    out = context_parallel(m, mesh)(**given)
    (d_q,) = torch.autograd.grad(out.sum(), [given["q"]], create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        d_q.sum().backward()


def cases(world):
    """What a call refuses in two processes, and what it sends in two and four."""
    yield "bytes", bytes_are_counted
    yield "by default", chosen_by_default
    if world == 4:
        yield "two dimensions", two_dimensions
        return
    for kind, rows in ((ValueError, REFUSED), (TypeError, REFUSED_TYPES)):
        for i, (text, by, change, words) in enumerate(rows):
            yield f"{i}: {text}, {words}", partial(refused, text, by, change, kind, words)
    yield "refused: DTensors", refused_dtensors
    yield "refused: plans", refused_plans
    yield "a second derivative", a_second_derivative
    for text, module, name, on in (
        *(("softmax", ring_reads, "with_lse", 1), ("softmax", ring_reads, "part_vjp", 1)),
        *(("lucid", solve, "with_lse", 1), ("lucid", solve, "part_vjp", 0)),
    ):
        yield f"an error in {name} of {text}", partial(error_of_all, text, module, name, on)


def few(world):
    """Every sixth of them."""
    yield from list(cases(world))[3::6]
