"""Caches that several processes divide: outputs and caches are those of one process.

As in `parallel_worker.py`, a row is a mechanism, a layout, and what is special.
"""

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from precondattn.parallel.layouts import tokens_of
from precondattn.parallel.torch import context_parallel, redistribute
from tests.core.parallel_worker import (
    CYCLIC,
    at,
    layout_of,
    named,
    of_tokens,
    require_equal,
    time_of,
    whole,
)
from tests.representatives import SCANNED

TOKENS = (
    *("softmax", "softmax[softcap=5,scale=0.3]", "laser", "differential", "qk_norm(softmax)"),
    *("lucid", "lucid[beta=true]", "lucid[normalize=none]", "qk_norm(lucid)", "lucid(laser)"),
    *("lucid[normalize=queries_and_keys,beta=true]", "temperature[per=head](lucid)"),
)
"""Mechanisms whose caches have a row for each token"""
STATES = (*SCANNED, "elu1(linear)")
BOTH = ("ccq", "ccq(lucid)")
NEW = (1, 3, 1, 1)
"""The numbers of tokens of the steps after a prompt"""


def require_same_cache(found, expected):
    assert (found.kinds, found.capacity) == (expected.kinds, expected.capacity)
    torch.testing.assert_close(found.length, expected.length, rtol=0, atol=0)
    for name, buffer in expected.store.items():
        is_state = "state" in str(expected.kinds[name])
        assert is_state or found.store[name].stride() == buffer.stride()
        require_equal(found.store[name], buffer, f"the buffer {name}")


def own_of(prompt, world, rank, *, by):
    """The positions of a process's tokens; the first process has more, where it may."""
    if by != "contiguous":
        return tokens_of(by, prompt, world, rank)
    each = prompt // world - 1
    return range(rank and prompt - (world - rank) * each, prompt - (world - rank - 1) * each)


def prompt_of(world, by):
    return {"contiguous": 5 * world - 1, "zigzag": 4 * world}.get(by, 7 * world + 1)


def decoded(expression, by, mesh, masks=(), donate=False, kind="clustered", limits=None, **of):
    """A prompt in parts, then new tokens on all processes: outputs and caches of one process."""
    rank, world = mesh.get_local_rank(), mesh.size()
    prompt = prompt_of(world, by)
    total = prompt + sum(NEW)
    m, x = whole(expression, layout_of(world, **{"t": total, "s": total, **of}), kind)
    b = x["q"].shape[0]
    limits = (prompt, prompt // 3) if limits is None else limits
    lengths = torch.tensor(limits[:b]) if "lengths" in masks else None
    key_mask = torch.arange(b * total).view(b, total) % 5 != 1 if "key_mask" in masks else None
    capacity = total + 2

    def masks_at(positions, lengths):
        given = {} if lengths is None else {"lengths": lengths}
        return given if key_mask is None else {**given, "key_mask": key_mask[:, positions]}

    def unread(inputs, positions, lengths):
        """NaN in place of padding."""
        for name, a in inputs.items():
            axis = time_of(m.inputs[name])
            if axis is not None and lengths is not None:
                each = a.shape[axis] // len(positions)
                past = torch.tensor(positions)[None] >= lengths[:, None]
                a[past.repeat_interleave(each, 1)] = torch.nan
        return inputs

    everything = range(prompt)
    reference = m.init_cache(**x, capacity=capacity, key_mask=key_mask is not None)
    given = of_tokens(m, x, everything)
    expected, reference = m.extend(reference, **given, **masks_at(everything, lengths))
    own = list(own_of(prompt, world, rank, by=by))
    attn = context_parallel(m, mesh, layout=by)
    mine = unread(of_tokens(m, x, own), own, lengths)
    out, cache = attn.prefill(**mine, capacity=capacity, **masks_at(own, lengths))
    require_equal(out, expected[:, own], "the output of the prompt")
    assert torch.equal(cache.length, reference.length)
    require_same_cache(redistribute(cache), reference)

    start, first = prompt, cache.held
    if first:
        of_sequences = [prompt] * b if lengths is None else lengths.tolist()
        assert first[rank] == tuple(sum(p < limit for p in own) for limit in of_sequences)
    for number, count in enumerate(NEW):
        positions = list(range(start, start + count))
        new = torch.tensor([count, max(count - 1, 0)][:b]) if lengths is not None else None
        tokens = unread(of_tokens(m, x, positions), range(count), new)
        before = {name: a.clone() for name, a in cache.part.store.items()}
        old, options = cache, masks_at(positions, new)
        expected, reference = m.extend(reference, **tokens, **options)
        out, cache = attn.extend(cache, **tokens, **options, donate=donate)
        require_equal(out, expected, f"the output of step {number}")
        if not donate:
            assert all(torch.equal(a, before[name]) for name, a in old.part.store.items())
        start += count
    everyone = [None] * world
    dist.all_gather_object(everyone, [out, cache.held, cache.length])
    assert all(torch.equal(of[0], out) for of in everyone)  # To the bit.
    assert all(of[1] == cache.held for of in everyone)
    require_kept_in_turn(cache, first, capacity, world)
    merged = redistribute(cache, to=world - 1)
    assert (merged is None) == (rank != world - 1)
    if merged is not None:
        require_same_cache(merged, reference)
        tokens = of_tokens(m, x, [0])
        options = {} if key_mask is None else {"key_mask": key_mask[:, :1]}
        (after, _), (expected, _) = (m.extend(c, **tokens, **options) for c in (merged, reference))
        require_equal(after, expected, "the output after it")


def require_kept_in_turn(cache, first, capacity, world):
    """The process that stores a new token had the fewest; `first` is `held` after the prompt."""
    if not cache.held:
        return
    for sequence, total in enumerate(cache.lengths):
        before, after = ([of[sequence] for of in held] for held in (first, cache.held))
        assert sum(after) == total
        kept = [new for old, new in zip(before, after, strict=True) if new > old]
        assert not kept or max(kept) <= min(after) + 1, (before, after)
    rank = dist.get_rank()
    assert torch.equal(cache.part.length, torch.tensor(cache.held[rank], dtype=torch.int32))
    most = max(*first[rank], -(-capacity // world))
    kinds = cache.part.kinds.items()
    assert {cache.part.store[n].shape[1] for n, kind in kinds if "tokens" in str(kind)} == {most}


def differentiated(expression, by, mesh, lengths=None):
    """Outputs and gradients from an initial state to the last state are those of one process."""
    rank, world = mesh.get_local_rank(), mesh.size()
    prompt = 5 * world - 1
    m, x = whole(expression, layout_of(world, t=prompt + 4, s=prompt + 4))
    _, start = m.extend(m.init_cache(**x), **of_tokens(m, x, range(4)))

    def leaves(inputs):
        return {n: a.detach().clone().requires_grad_() for n, a in inputs.items()}

    given, states = leaves(of_tokens(m, x, range(4, prompt + 4))), leaves(start.store)
    masks = {} if lengths is None else {"lengths": torch.tensor([prompt, 3])}
    expected, end = m.extend(start._replace(store=states), **given, **masks)

    def cotangents(out, store):
        return [torch.linspace(-1, 1, a.numel(), dtype=a.dtype).view_as(a) for a in (out, *store)]

    of_all = cotangents(expected, end.store.values())
    true = torch.autograd.grad(
        [expected, *end.store.values()], [*given.values(), *states.values()], of_all
    )
    own = list(own_of(prompt, world, rank, by=by))
    mine, begin = leaves(of_tokens(m, given, own)), leaves(start.store)
    attn = context_parallel(m, mesh, layout=by)
    out, cache = attn.prefill(**mine, **masks, cache=start._replace(store=begin))
    require_equal(out, expected[:, own], "the output")
    assert torch.equal(cache.length, end.length)
    whole_one = redistribute(cache)
    for name, state in end.store.items():
        require_equal(whole_one.store[name], state, f"the state {name}")
    # Every process has a term of the loss of the last states.
    shares = [of_all[0][:, own], *(a / world for a in of_all[1:])]
    given = [*mine.values(), *begin.values()]
    found = torch.autograd.grad([out, *whole_one.store.values()], given, shares)
    for name, gradient, all_of_it in zip([*mine, *begin], found, true, strict=True):
        if name in begin or time_of(m.inputs[name]) is None:
            gradient = gradient.clone()
            dist.all_reduce(gradient)
        else:
            all_of_it = at(all_of_it, m.inputs[name], own)
        scale = max(1.0, float(all_of_it.abs().max()))
        require_equal(gradient / scale, all_of_it / scale, f"the gradient of {name}")
    assert rank == 0 or not any(bool(g.any()) for g in found[len(mine) :])


def in_bfloat16(expression, by, mesh):
    """As near to the exact numbers as one process."""
    rank, world = mesh.get_local_rank(), mesh.size()
    prompt = prompt_of(world, by)
    m, x = whole(expression, layout_of(world, t=prompt + 3, s=prompt + 3))
    half = {name: a.to(torch.bfloat16) for name, a in x.items()}
    new = of_tokens(m, half, range(prompt, prompt + 3))

    def one_process(dtype):
        inputs = {name: a.to(dtype) for name, a in half.items()}
        cache = m.init_cache(**inputs, capacity=prompt + 3)
        _, cache = m.extend(cache, **of_tokens(m, inputs, range(prompt)))
        return m.extend(cache, **{name: a.to(dtype) for name, a in new.items()})

    (exact, _), (usual, reference) = one_process(torch.float64), one_process(torch.bfloat16)
    attn = context_parallel(m, mesh, layout=by)
    own = own_of(prompt, world, rank, by=by)
    _, cache = attn.prefill(**of_tokens(m, half, own), capacity=prompt + 3)
    out, cache = attn.extend(cache, **new)
    assert out.dtype == torch.bfloat16
    error, bound = ((found - exact).abs().max() / exact.abs().max() for found in (out, usual))
    assert error < 1.5 * bound + 2**-9
    dtypes = [{n: a.dtype for n, a in c.store.items()} for c in (redistribute(cache), reference)]
    assert dtypes[0] == dtypes[1]


def as_dtensors(mesh):
    """Parts of the prompt as shards, new tokens as replicas."""
    rank, world = mesh.get_local_rank(), mesh.size()
    prompt = 4 * world
    m, x = whole("lucid", layout_of(world, t=prompt + 1, s=prompt + 1))
    expected = m(**x)[:, prompt:]
    attn = context_parallel(m, mesh, layout="contiguous")
    mine = of_tokens(m, x, own_of(prompt, world, rank, by="cyclic[block=4]"))
    parts = {n: DTensor.from_local(a, mesh, [Shard(1)]) for n, a in mine.items()}
    out, cache = attn.prefill(**parts, capacity=prompt + 1)
    assert out.shape == (*x["q"].shape[:1], prompt, *x["q"].shape[2:3], x["v"].shape[-1])
    new, placement = of_tokens(m, x, [prompt]), [Replicate()]
    new = {n: DTensor.from_local(a, mesh, placement) for n, a in new.items()}
    out, _ = attn.extend(cache, **new)
    assert out.placements == (Replicate(),)
    require_equal(out.to_local(), expected, "the output")


def rows(world):
    """Rows (mechanism, layout, options of `decoded`): all with two processes, else some."""
    if world == 1:
        yield from ((text, "contiguous", {}) for text in ("lucid", "gated_delta"))
        return
    of_tokens, of_states, some = TOKENS, STATES, slice(None, None, world - 1)
    if world > 2:
        of_tokens, of_states = TOKENS[world % 2 :: 2], STATES[world % 2 :: 4]
    for number, text in enumerate(of_tokens):
        yield text, ("contiguous", "zigzag", CYCLIC)[(number + world) % 3], {}
    for number, text in enumerate((*of_states, *BOTH)):
        masks = ((), ("lengths",), (), ("lengths", "key_mask"))[number % 4]
        yield text, "contiguous", {"masks": masks} if masks else {}
    for text in ("softmax", "laser", "lucid[beta=true]", "differential")[some]:
        for masks in (("lengths",), ("lengths", "key_mask")):
            yield text, "zigzag" if masks == ("lengths",) else CYCLIC, {"masks": masks}
    yield "softmax", CYCLIC, {"masks": ("key_mask",)}
    ragged = {"masks": ("lengths",)}
    for text in ("lucid", "laser"):  # No token on the last process.
        yield text, "contiguous", {**ragged, "limits": (2, 0)}
    yield "lucid", "zigzag", {"heads": (6, 1)}
    yield "ccq(lucid)", "contiguous", {**ragged, "donate": True}
    if world < 4:
        yield "lucid", CYCLIC, {"donate": True}
        yield from (("lucid", "zigzag", {"kind": kind}) for kind in ("duplicate", "zero"))


def state_rows(world):
    """Rows of `differentiated`."""
    for text in STATES[:: {1: 9, 2: 1}.get(world, 4)]:
        yield text, "contiguous", {}
    yield "gated_delta", "contiguous", {"lengths": True}


def cases(world):
    """All of them in two processes, and some of each kind in three and four."""
    yield from named(rows(world), decoded)
    for name, case in named(state_rows(world), differentiated):
        yield f"{name}, from a state", case
    if world == 2:
        halves = [(text, "contiguous", {}) for text in ("gated_delta", "ccq(lucid)")]
        halves += [(text, "zigzag", {}) for text in ("softmax", "laser", "lucid")]
        for name, case in named(halves, in_bfloat16):
            yield f"{name}, bfloat16", case
        yield "as DTensors", as_dtensors


def few(world):
    """A row of each kind of caches."""
    some = [("lucid", CYCLIC, {"masks": ("lengths",)}), ("ccq(lucid)", "contiguous", {})]
    yield from named(some, decoded)
    yield from named([("gated_delta", "contiguous", {})], differentiated)
