"""Refusals of divided caches, which both processes raise alike, and caches that were donated."""

from functools import partial
from itertools import count
from unittest.mock import patch

import pytest

pytest.importorskip("torch")

import torch
from torch.distributed.device_mesh import init_device_mesh

import precondattn as pa
from precondattn.parallel import ring_reads, solve
from precondattn.parallel.torch import context_parallel, divided_cache, redistribute, states
from tests.core.parallel_cache_worker import own_of
from tests.core.parallel_refusals import require_refused
from tests.core.parallel_worker import layout_of, of_tokens, whole


def made(mesh, expression="lucid", by="contiguous", capacity=12, **more):
    """A divided call with its cache, this process's tokens, and one new token."""
    rank, world = mesh.get_local_rank(), mesh.size()
    m, x = whole(expression, layout_of(world))
    attn = context_parallel(m, mesh, layout=by)
    mine, new = of_tokens(m, x, own_of(8, world, rank, by=by)), of_tokens(m, x, [8])
    cache = attn.prefill(**mine, capacity=capacity, **more)[1]
    return attn, cache, mine, new


def refusals(mesh):
    rank = mesh.get_local_rank()
    attn, cache, mine, new = made(mesh)
    linear, states, its, one = made(mesh, "gated_delta")
    plain = pa.GatedDelta()
    start = plain.init_cache(**its)
    begun = plain.extend(start, **one)[1]
    of_heads = context_parallel("lucid", mesh, layout="heads")
    cyclic = context_parallel("lucid", mesh, layout="cyclic[block=4]")
    both = context_parallel("ccq", mesh, layout="contiguous")
    tokens = pa.Lucid().init_cache(**mine, capacity=4)
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
    elsewhere = context_parallel("lucid", other["other"], layout="contiguous")
    whole_one = redistribute(cache)

    def differs(x, changed):
        return changed if rank else x

    q, k, v = new["q"], new["k"], new["v"]
    ones = torch.ones(2, 1, dtype=torch.bool)
    prefill, extend = attn.prefill, attn.extend
    packed = torch.zeros(2, mine["k"].shape[1], dtype=torch.int64)
    free = context_parallel("softmax[causal=false]", mesh, layout="contiguous")
    of_fewer = begun._replace(store={n: a[:, :1] for n, a in begun.store.items()})
    beside = {**mine, "contraction": mine["q"][..., 0].abs().clamp(max=1)}
    with_tokens = both.mechanism.init_cache(**beside, capacity=12)
    twice, five = ({n: torch.cat([x] * i, 1) for n, x in new.items()} for i in (2, 5))
    heads = (q, k[..., :2, :1, :], v[..., :1, :])
    same, more = "all processes must call the same", {"capacity": 12}
    of_lucid = "the cache must be of the mechanism 'lucid'; it is of 'gated_delta'"
    cyclic_words = "the cache must be of the layout 'cyclic[block=4]'; it is of 'contiguous'"
    no_cache = "must be a DividedCache from prefill; found Cache"
    values = [
        ("found 'heads'", lambda: of_heads.prefill(**mine, capacity=9)),
        ("is not causal, so it can not", lambda: free.prefill(**mine, capacity=9)),
        ("capacity must be a whole number, 1 or", lambda: prefill(**mine, capacity=2.5)),
        ("capacity must be 8 or above", lambda: prefill(**mine, capacity=7)),
        (same, lambda: prefill(**mine, capacity=differs(9, 10))),
        ("cache must be of states only", lambda: prefill(**mine, **more, cache=tokens)),
        ("the cache is of another mechanism", lambda: linear.prefill(**its, cache=whole_one)),
        ("that of ccq has tokens", lambda: both.prefill(**beside, **more, cache=with_tokens)),
        ("has shape", lambda: linear.prefill(**its, cache=of_fewer)),
        (of_lucid, lambda: extend(states, **new)),
        ("the cache must be of the mesh", lambda: elsewhere.extend(cache, **new)),
        (cyclic_words, lambda: cyclic.extend(cache, **new)),
        (same, lambda: extend(cache, **differs(new, twice))),
        (same, lambda: extend(cache, **new) if rank else prefill(**mine, **more)),
        (same, lambda: extend(cache, **new, lengths=differs([1, 1], [1, 0]))),
        ("lengths must lie between 0 and t = 1", lambda: extend(cache, **new, lengths=[1, 2])),
        ("these inputs need", lambda: extend(cache, *heads)),
        ("this cache stores no key_mask", lambda: extend(cache, **new, key_mask=ones)),
        ("capacity exceeded: the cache holds at most 12", lambda: extend(cache, **five)),
        ("has no gradient", lambda: extend(cache, q.clone().requires_grad_(), k, v)),
        ("to must be a process, 0 to 1, or None for all", lambda: redistribute(cache, to=2)),
        ("capacity must be 8 or above", lambda: redistribute(cache, capacity=4)),
        (same, lambda: redistribute(cache, to=rank)),
    ]
    types = [
        ("segment_ids belong to a full", lambda: prefill(**mine, **more, segment_ids=packed)),
        ("cu_seqlens belong to a full call", lambda: extend(cache, **new, cu_seqlens=[0, 1])),
        ("missing capacity", lambda: prefill(**mine)),
        ("cache must be an ordinary Cache", lambda: linear.prefill(**its, cache=states)),
        ("process 1: cache must be an", lambda: linear.prefill(**its, cache=differs(begun, 3))),
        (no_cache, lambda: extend(whole_one, **new)),
        ("has dtype float64; these", lambda: extend(cache, q.float(), k.float(), v.float())),
        ("missing v", lambda: extend(cache, q, k)),
        (no_cache, lambda: redistribute(whole_one)),
    ]
    for kind, rows in ((ValueError, values), (TypeError, types)):
        for words, call in rows:
            require_refused(mesh, kind, words, call)


def donated(mesh):
    (attn, cache, _, new), failed = made(mesh), made(mesh)[1]
    attn.extend(cache, **new, donate=True)
    without_memory = patch.object(divided_cache, "append", side_effect=MemoryError)
    with without_memory, pytest.raises(RuntimeError, match="process 0"):
        attn.extend(failed, **new, donate=True)
    for each in (cache, failed):
        for call in (partial(attn.extend, each, **new), partial(redistribute, each)):
            require_refused(mesh, ValueError, "this cache was donated", call)
    with torch.enable_grad():
        m, x = whole("lucid", layout_of(mesh.size()))
        own = own_of(8, mesh.size(), mesh.get_local_rank(), by="contiguous")
        mine = of_tokens(m, {n: a.requires_grad_() for n, a in x.items()}, own)
        _, cache = attn.prefill(**mine, capacity=12)
        words = "have no gradient"
        require_refused(mesh, ValueError, words, lambda: redistribute(cache))
        with torch.no_grad():
            assert not any(a.requires_grad for a in redistribute(cache).store.values())


def error_of_all(module, name, expression, number, mesh):
    """The error may be in any leaf, before or after an exchange of parts."""
    m, x = whole(expression, layout_of(2))
    attn = context_parallel(m, mesh, layout="contiguous")
    own = own_of(8, 2, mesh.get_local_rank(), by="contiguous")
    _, cache = attn.prefill(**of_tokens(m, x, own), capacity=12)
    new, calls, function = of_tokens(m, x, [8]), count(1), getattr(module, name)

    def failing(*arguments, **options):
        if next(calls) == number and mesh.get_local_rank() == 1:
            raise ValueError("out of memory")
        return function(*arguments, **options)

    with patch.object(module, name, failing):
        words = "process 1: out of memory"
        require_refused(mesh, ValueError, words, lambda: attn.extend(cache, **new))
    attn.extend(cache, **new)


ERRORS = (
    *((ring_reads, "with_lse", "differential", number) for number in (1, 2, 3, 4)),
    (solve, "with_lse", "lucid", 1),
    *((states, "with_states", text, 1) for text in ("ccq(lucid)", "gated_delta")),
)


def cases(world):
    yield "refusals", refusals
    yield "donated", donated
    for row in ERRORS:
        yield f"an error in {row[1:]}", partial(error_of_all, *row)


def few(world):
    yield "donated", donated
