"""Refusals of divided calls, which all processes raise alike, and what a call sends."""

from contextlib import contextmanager
from functools import partial

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from precondattn.parallel import ring_reads
from precondattn.parallel.layouts import tokens_of
from precondattn.parallel.torch import context_parallel, solve
from tests.core.parallel_worker import CYCLIC, RINGS, at, divided, layout_of, part_of, whole


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


def bytes_are_counted(mesh):
    """What `explain` says is what is sent, and the gradient sends as much in all."""
    asked = [
        *(("lucid", {"heads": heads}, "heads") for heads in ((8, 8), (8, 2), (8, 1))),
        *(("gated_delta", {}, "heads"), ("softmax[bias=true]", {"heads": (8, 2)}, "heads")),
        *((text, {}, "contiguous") for text in ("linear", "gated_delta", "ccq(gla)", *RINGS)),
        *(("differential", {}, "zigzag"), ("lucid", {}, "contiguous"), ("lucid", {}, CYCLIC)),
    ]
    for text, sizes, by in asked:
        m, given = part_of(text, mesh, t=16, s=16, **sizes)
        given = {n: a.clone().requires_grad_() for n, a in given.items()}
        attn = context_parallel(m, mesh, layout=by)
        plan = attn.explain(**given)
        with sent_bytes() as sent:
            out = attn(**given)
            forward = sum(sent)
            out.sum().backward()
        assert forward == sum(plan.bytes_sent.values()), (text, sizes, by)
        assert f"{forward:,} bytes sent" in str(plan)
        everyone = [None] * mesh.size()
        dist.all_gather_object(everyone, (forward, sum(sent) - forward))
        # Gradients go beside keys in the others.
        if by == "heads" or text in ("linear", "gated_delta", "ccq(gla)"):
            assert sum(a for a, _ in everyone) == sum(b for _, b in everyone)


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


def on_one(name, change):
    """A change of an input on process 1."""
    return lambda rank, x: {name: change(x[name])} if rank else {}


def every_input(change):
    return lambda rank, x: {name: change(x[name]) for name in "qkv"}


def unchanged(rank, x):
    return {}


SAME = "must call the same"
CONTIGUOUS = "contiguous"
REFUSED = {
    "other heads on one": (
        *("lucid", "heads", on_one("q", lambda q: q[:, :, :1])),
        *(ValueError, (SAME, "process 1")),
    ),
    "another dtype on one": (
        *("lucid", "heads", on_one("v", lambda v: v.float())),
        *(ValueError, (SAME, "float32")),
    ),
    "a list on one": (
        *("lucid", "heads", on_one("k", lambda k: k.tolist())),
        *(TypeError, "process 1: k must be a tensor; found list"),
    ),
    "fewer keys than values on one": (
        *("lucid", "heads", on_one("k", lambda k: k[:, 1:])),
        *(ValueError, ("process 1: v has", "tokens, and k has")),
    ),
    "no token on one": (
        "lucid",
        "heads",
        lambda rank, x: {n: a[:, :0] for n, a in x.items()} if rank else {},
        *(ValueError, "every process must have a token"),
    ),
    "heads that can not be divided": (
        *("lucid", "heads", every_input(lambda a: a[:, :, :1].expand(-1, -1, 3, -1))),
        *(ValueError, "2 devices divide the number of heads of the output; found h=3"),
    ),
    "heads that depend on their number": (
        *("retention", "heads", unchanged, ValueError, ("retention", "depends on its number")),
    ),
    "an input too many": (
        *("lucid", "heads", lambda rank, x: {"beta": x["q"][..., 0]}),
        *(TypeError, "process 0: lucid: unknown keyword 'beta'"),
    ),
    "an error of the call": (
        *("lucid", "heads", lambda rank, x: {"lengths": torch.tensor([1, 2, 3])}),
        *(ValueError, "lengths"),
    ),
    "a mask that is not one of tokens": (
        *("lucid", "heads", lambda rank, x: {"key_mask": torch.ones(2, 1, dtype=torch.bool)}),
        *(ValueError, "key_mask has 1 tokens, and"),
    ),
    "states that are not those of one recurrence": (
        *("deltaformer", CONTIGUOUS, unchanged),
        *(ValueError, "no way to divide the tokens of deltaformer;"),
    ),
    "a bias": (
        *("softmax[bias=true]", CONTIGUOUS, unchanged),
        *(ValueError, "bias of softmax[bias=true] is of pairs"),
    ),
    "distances without causality": (
        *("softmax[causal=false,distance=slopes]", CONTIGUOUS, unchanged, ValueError),
        ("gathers the keys before a query", "is not causal; use the layout 'heads'"),
    ),
    "lengths that differ": (
        *("lucid", "heads", lambda rank, x: {"lengths": [9, 3 + rank]}),
        *(ValueError, (SAME, "lengths [9, 3]")),
    ),
    "masks of another dtype": (
        "lucid",
        "heads",
        lambda rank, x: {
            "segment_ids": torch.zeros(2, 5 - rank, dtype=(torch.int32, torch.int64)[rank])
        },
        *(ValueError, (SAME, "segment_ids int32")),
    ),
    "lengths beyond the tokens": (
        *("gla", CONTIGUOUS, lambda rank, x: {"lengths": [59, -7]}),
        *(ValueError, "lengths must lie between 0"),
    ),
    "an odd number of tokens in two parts": (
        *("softmax", "zigzag", unchanged, ValueError, "expects two equal parts of tokens"),
    ),
    "a zigzag of states": (
        *("gla", "zigzag", unchanged, ValueError, "not consecutive, as gla needs them"),
    ),
    "states of segments that come again": (
        *("gla", CONTIGUOUS),
        lambda rank, x: {"segment_ids": (torch.arange(5 - rank) > 1).expand(2, -1).int()},
        *(ValueError, "segment_ids must be contiguous"),
    ),
    "an order that has other numbers": (
        *("lucid", "cyclic[block=3]", unchanged, ValueError),
        "expects 6, 3 tokens on the processes; found 5, 4",
    ),
    "a solve without a metric of its own": (
        *("lucid(path)", CONTIGUOUS, unchanged, ValueError, "divides solves of dot products"),
    ),
    "a solve with a window": (
        *("lucid(softmax[window=3])", CONTIGUOUS, unchanged, ValueError, "without a window"),
    ),
}
"""Of a call: mechanism, layout, change of its inputs, error and words"""


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
    function = getattr(module, name)

    def failing(*arguments, **options):
        raise ValueError("out of memory")

    call = context_parallel(m, mesh, layout="contiguous")
    out = call(*given) if name.endswith("vjp") else None
    setattr(module, name, failing if mesh.get_local_rank() == on else function)
    try:
        with pytest.raises(ValueError, match=f"process {on}: out of memory"):
            call(*given) if out is None else out.sum().backward()
    finally:
        setattr(module, name, function)


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


def in_bfloat16(text, by, mesh):
    """As near as one process, whose sums are in float32 too; to the bit where heads are divided."""
    t = 6 * mesh.size()
    m, x = whole(text, layout_of(mesh.size(), t=t, s=t))
    half = {n: a.to(torch.bfloat16) for n, a in x.items()}
    order = "contiguous" if by == "heads" else by
    own = tokens_of(order, t, mesh.size(), mesh.get_local_rank())
    exact = m(**{n: a.double() for n, a in half.items()})[:, own]
    usual = m(**half)[:, own]
    given = {n: at(a, m.inputs[n], own) for n, a in half.items()}
    out = context_parallel(m, mesh, layout=by)(**given)

    def error(found):
        return float((found - exact).abs().max() / exact.abs().max())

    assert out.dtype == torch.bfloat16
    assert error(out) < 1.5 * error(usual) + 2**-9
    assert by != "heads" or torch.equal(out, usual)


def cases(world):
    """What a call refuses in two processes, and what it sends in two and four."""
    yield "bytes", bytes_are_counted
    yield "by default", chosen_by_default
    if world == 4:
        yield "two dimensions", two_dimensions
        return
    for name, row in REFUSED.items():
        yield f"refused: {name}", partial(refused, *row)
    yield "refused: DTensors", refused_dtensors
    yield "refused: plans", refused_plans
    yield "a second derivative", a_second_derivative
    for text, module, name, on in (
        *(("softmax", ring_reads, "with_lse", 1), ("softmax", ring_reads, "part_vjp", 1)),
        *(("lucid", solve, "with_lse", 1), ("lucid", solve, "part_vjp", 0)),
    ):
        yield f"an error in {name} of {text}", partial(error_of_all, text, module, name, on)
    for text, by in (
        *(("gated_delta", "heads"), ("softmax", "zigzag"), ("laser", "zigzag")),
        ("lucid", "zigzag"),
    ):
        yield f"{text}, {by}, bfloat16", partial(in_bfloat16, text, by)


def few(world):
    """Every sixth of them."""
    yield from list(cases(world))[3::6]
