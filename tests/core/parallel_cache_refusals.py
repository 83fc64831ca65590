"""Refusals of divided caches, which both processes raise alike, and caches that were donated."""

from functools import partial
from unittest.mock import patch

import pytest

pytest.importorskip("torch")

import torch
from torch.distributed.device_mesh import init_device_mesh

import precondattn as pa
from precondattn.parallel import ring_reads
from precondattn.parallel.torch import (
    context_parallel,
    divided_cache,
    redistribute,
    solve_cache,
    states_cache,
)
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
    wide = "capacity must be a whole number, 1 or above; found 2.5"
    heads = (q, k[..., :2, :1, :], v[..., :1, :])
    same, of_lucid = (
        "all processes must call the same",
        "the cache must be of the mechanism 'lucid'",
    )
    cyclic_words = "the cache must be of the layout 'cyclic[block=4]'; it is of 'contiguous'"
    no_cache = "must be a DividedCache from prefill; found Cache"
    rows = [
        (ValueError, "found 'heads'", lambda: of_heads.prefill(**mine, capacity=9)),
        (
            *(TypeError, "segment_ids belong to a full call"),
            lambda: prefill(**mine, capacity=9, segment_ids=packed),
        ),
        (
            *(TypeError, "cu_seqlens belong to a full call"),
            lambda: extend(cache, **new, cu_seqlens=[0, 1]),
        ),
        (ValueError, "is not causal, so it can not", lambda: free.prefill(**mine, capacity=9)),
        (TypeError, "missing capacity", lambda: prefill(**mine)),
        (ValueError, wide, lambda: prefill(**mine, capacity=2.5)),
        (ValueError, "capacity must be 8 or above", lambda: prefill(**mine, capacity=7)),
        (ValueError, same, lambda: prefill(**mine, capacity=differs(9, 10))),
        (
            *(ValueError, "cache must be of states only"),
            lambda: prefill(**mine, capacity=12, cache=tokens),
        ),
        (
            *(TypeError, "cache must be an ordinary Cache"),
            lambda: linear.prefill(**its, cache=states),
        ),
        (
            *(TypeError, "process 1: cache must be an ordinary Cache"),
            lambda: linear.prefill(**its, cache=differs(begun, 3)),
        ),
        (
            *(ValueError, "the cache is of another mechanism"),
            lambda: linear.prefill(**its, cache=whole_one),
        ),
        (
            *(ValueError, "that of ccq has tokens"),
            lambda: both.prefill(**beside, capacity=12, cache=with_tokens),
        ),
        (ValueError, "has shape", lambda: linear.prefill(**its, cache=of_fewer)),
        (TypeError, no_cache, lambda: extend(whole_one, **new)),
        (ValueError, f"{of_lucid}; it is of 'gated_delta'", lambda: extend(states, **new)),
        (ValueError, "the cache must be of the mesh", lambda: elsewhere.extend(cache, **new)),
        (ValueError, cyclic_words, lambda: cyclic.extend(cache, **new)),
        (ValueError, same, lambda: extend(cache, **differs(new, twice))),
        (
            *(ValueError, same),
            lambda: extend(cache, **new) if rank else prefill(**mine, capacity=12),
        ),
        (ValueError, same, lambda: extend(cache, **new, lengths=differs([1, 1], [1, 0]))),
        (
            *(ValueError, "lengths must lie between 0 and t = 1"),
            lambda: extend(cache, **new, lengths=[1, 2]),
        ),
        (ValueError, "these inputs need", lambda: extend(cache, *heads)),
        (
            *(TypeError, "has dtype float64; these inputs need float32"),
            lambda: extend(cache, q.float(), k.float(), v.float()),
        ),
        (TypeError, "missing v", lambda: extend(cache, q, k)),
        (
            *(ValueError, "this cache stores no key_mask"),
            lambda: extend(cache, **new, key_mask=ones),
        ),
        (
            *(ValueError, "capacity exceeded: the cache holds at most 12 tokens"),
            lambda: extend(cache, **five),
        ),
        (
            *(ValueError, "the extension of a divided cache has no gradient"),
            lambda: extend(cache, q.clone().requires_grad_(), k, v),
        ),
        (
            *(ValueError, "to must be a process, 0 to 1, or None for all; found 2"),
            lambda: redistribute(cache, to=2),
        ),
        (ValueError, "capacity must be 8 or above", lambda: redistribute(cache, capacity=4)),
        (ValueError, same, lambda: redistribute(cache, to=rank)),
        (TypeError, no_cache, lambda: redistribute(whole_one)),
        (ValueError, "found 'vjp'", lambda: attn.explain(**mine, verb="vjp")),
    ]
    for kind, words, call in rows:
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
    new, function, calls = of_tokens(m, x, [8]), getattr(module, name), []

    def failing(*arguments, **options):
        calls.append(None)
        if mesh.get_local_rank() == 1 and len(calls) == number:
            raise ValueError("out of memory")
        return function(*arguments, **options)

    setattr(module, name, failing)
    try:
        words = "process 1: out of memory"
        require_refused(mesh, ValueError, words, lambda: attn.extend(cache, **new))
    finally:
        setattr(module, name, function)
    attn.extend(cache, **new)


ERRORS = (
    *((ring_reads, "with_lse", "differential", number) for number in (1, 2, 3, 4)),
    (solve_cache, "with_lse", "lucid", 1),
    *((states_cache, "with_states", text, 1) for text in ("ccq(lucid)", "gated_delta")),
)


def cases(world):
    yield "refusals", refusals
    yield "donated", donated
    for row in ERRORS:
        yield f"an error in {row[1:]}", partial(error_of_all, *row)


def few(world):
    yield "donated", donated
