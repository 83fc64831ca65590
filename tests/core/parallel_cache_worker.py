"""Several processes divide a cache. `tests/ranks.py` starts them; each calls `main`.

As in `parallel_worker.py`, a process writes the names of its cases, and the error of each that
failed.
"""

from functools import partial
from unittest.mock import patch

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import precondattn as pa
from precondattn.parallel import ring_reads
from precondattn.parallel.layouts import tokens_of
from precondattn.parallel.torch import (
    context_parallel,
    divided_cache,
    redistribute,
    solve_cache,
    states_cache,
)
from tests.core.parallel_worker import layout_of, require_equal, run, sent_bytes, time_of, whole
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


def require_same_cache(found, expected, tolerance):
    assert (found.kinds, found.capacity) == (expected.kinds, expected.capacity)
    assert torch.equal(found.length, expected.length)
    assert found.length.dtype == expected.length.dtype
    for name, buffer in expected.store.items():
        assert found.store[name].dtype == buffer.dtype
        is_state = "state" in str(expected.kinds[name])
        assert is_state or found.store[name].stride() == buffer.stride()
        if buffer.dtype == torch.bool:
            assert torch.equal(found.store[name], buffer)
        else:
            require_equal(found.store[name], buffer, f"the buffer {name}", tolerance)


def own_of(prompt, world, rank, *, by):
    """The positions of a process's tokens; the first process has more, where it may."""
    if by != "contiguous":
        return tokens_of(by, prompt, world, rank)
    each = prompt // world - 1
    return range(rank and prompt - (world - rank) * each, prompt - (world - rank - 1) * each)


def prompt_of(world, by):
    return {"contiguous": 5 * world - 1, "zigzag": 4 * world}.get(by, 7 * world + 1)


def decoded(
    expression,
    mesh,
    by,
    *,
    dtype=torch.float64,
    tolerance=1e-10,
    masks=(),
    donate=False,
    kind="clustered",
    limits=None,
    **of,
):
    """A prompt in parts, then new tokens on all processes: outputs and caches of one process."""
    rank, world = mesh.get_local_rank(), mesh.size()
    prompt = prompt_of(world, by)
    total = prompt + sum(NEW)
    m, x = whole(expression, layout_of(world, **{"t": total, "s": total, **of}), kind)
    x = {name: a.to(dtype) for name, a in x.items()}
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
    require_equal(out, expected[:, own], "the output of the prompt", tolerance)
    assert torch.equal(cache.length, reference.length)
    require_same_cache(redistribute(cache), reference, tolerance)

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
        require_equal(out, expected, f"the output of step {number}", tolerance)
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
        require_same_cache(merged, reference, tolerance)
        tokens = of_tokens(m, x, [0])
        options = {} if key_mask is None else {"key_mask": key_mask[:, :1]}
        (after, _), (expected, _) = (m.extend(c, **tokens, **options) for c in (merged, reference))
        require_equal(after, expected, "the output after it", tolerance)


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


def differentiated(expression, mesh, dtype=torch.float64, tolerance=1e-10, lengths=None):
    """Outputs and gradients from an initial state to the last state are those of one process."""
    rank, world = mesh.get_local_rank(), mesh.size()
    prompt = 5 * world - 1
    m, x = whole(expression, layout_of(world, t=prompt + 4, s=prompt + 4))
    x = {name: a.to(dtype) for name, a in x.items()}
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
    own = list(own_of(prompt, world, rank, by="contiguous"))
    mine, begin = leaves(of_tokens(m, given, own)), leaves(start.store)
    attn = context_parallel(m, mesh, layout="contiguous")
    out, cache = attn.prefill(**mine, **masks, cache=start._replace(store=begin))
    require_equal(out, expected[:, own], "the output", tolerance)
    assert torch.equal(cache.length, end.length)
    whole_one = redistribute(cache)
    for name, state in end.store.items():
        require_equal(whole_one.store[name], state, f"the state {name}", tolerance)
    # Every process has a term of the loss of the last states.
    shares = [a / world for a in of_all[1:]]
    found = torch.autograd.grad(
        [out, *whole_one.store.values()],
        [*mine.values(), *begin.values()],
        [of_all[0][:, own], *shares],
    )
    names = [*mine, *begin]
    for name, gradient, all_of_it in zip(names, found, true, strict=True):
        if name in begin or time_of(m.inputs[name]) is None:
            gradient = gradient.clone()
            dist.all_reduce(gradient)
        else:
            all_of_it = at(all_of_it, m.inputs[name], own)
        scale = max(1.0, float(all_of_it.abs().max()))
        what = f"the gradient of {name}"
        require_equal(gradient / scale, all_of_it / scale, what, tolerance)
    assert rank == 0 or not any(bool(g.any()) for g in found[len(mine) :])


def in_bfloat16(mesh, expression, by):
    """As near to the exact numbers as one process."""
    rank, world = mesh.get_local_rank(), mesh.size()
    prompt = prompt_of(world, by)
    m, x = whole(expression, layout_of(world, t=prompt + 3, s=prompt + 3))
    half = {name: a.to(torch.bfloat16) for name, a in x.items()}

    def one_process(inputs):
        cache = m.init_cache(**inputs, capacity=prompt + 3)
        _, cache = m.extend(cache, **of_tokens(m, inputs, range(prompt)))
        return m.extend(cache, **of_tokens(m, inputs, range(prompt, prompt + 3)))

    exact, _ = one_process({name: a.double() for name, a in half.items()})
    usual, reference = one_process(half)
    attn = context_parallel(m, mesh, layout=by)
    own = own_of(prompt, world, rank, by=by)
    _, cache = attn.prefill(**of_tokens(m, half, own), capacity=prompt + 3)
    out, cache = attn.extend(cache, **of_tokens(m, half, range(prompt, prompt + 3)))

    def error(found):
        return float((found - exact).abs().max() / exact.abs().max())

    assert out.dtype == torch.bfloat16
    assert error(out) < 1.5 * error(usual) + 2**-9
    found = redistribute(cache)
    assert {n: a.dtype for n, a in found.store.items()} == {
        n: a.dtype for n, a in reference.store.items()
    }


def as_dtensors(mesh):
    """Parts of the prompt as shards, new tokens as replicas."""
    rank, world = mesh.get_local_rank(), mesh.size()
    prompt = 4 * world
    m, x = whole("lucid", layout_of(world, t=prompt + 1, s=prompt + 1))
    _, reference = m.extend(
        m.init_cache(**x, capacity=prompt + 1), **of_tokens(m, x, range(prompt))
    )
    expected, _ = m.extend(reference, **of_tokens(m, x, [prompt]))
    attn = context_parallel(m, mesh, layout="contiguous")
    mine = of_tokens(m, x, own_of(prompt, world, rank, by="cyclic[block=4]"))
    parts = {n: DTensor.from_local(a, mesh, [Shard(1)]) for n, a in mine.items()}
    out, cache = attn.prefill(**parts, capacity=prompt + 1)
    assert out.shape == (*x["q"].shape[:1], prompt, *x["q"].shape[2:3], x["v"].shape[-1])
    new = {
        n: DTensor.from_local(a, mesh, [Replicate()]) for n, a in of_tokens(m, x, [prompt]).items()
    }
    out, _ = attn.extend(cache, **new)
    assert out.placements == (Replicate(),)
    require_equal(out.to_local(), expected, "the output")


def bytes_are_counted(mesh):
    """What `explain` says of a prefill and of a step is what is sent."""
    rank, world = mesh.get_local_rank(), mesh.size()
    for expression in ("softmax", "lucid", "differential", "gated_delta", "ccq", "ccq(lucid)"):
        prompt = 4 * world
        m, x = whole(expression, layout_of(world, t=prompt + 2, s=prompt + 2))
        attn = context_parallel(m, mesh, layout="contiguous")
        mine = of_tokens(m, x, own_of(prompt, world, rank, by="contiguous"))
        plan = attn.explain(**mine, verb="prefill")
        with sent_bytes() as sent:
            _, cache = attn.prefill(**mine, capacity=prompt + 2)
        assert sum(sent) == sum(plan.bytes_sent.values()), expression
        new = of_tokens(m, x, [prompt, prompt + 1])
        plan = attn.explain(**new, cache=cache)
        with sent_bytes() as sent:
            attn.extend(cache, **new)
        assert sum(sent) == sum(plan.bytes_sent.values()), expression
        assert (expression == "gated_delta") == (not plan.bytes_sent)
        assert f"{sum(sent):,} bytes sent" in str(plan)


def require_refused(mesh, kind, words, call):
    """A call raises the same error on all processes."""
    with pytest.raises(kind) as raised:
        call()
    assert words in str(raised.value), str(raised.value)
    everyone = [None] * mesh.size()
    dist.all_gather_object(everyone, str(raised.value))
    assert len(set(everyone)) == 1, everyone


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
    cases = {
        "heads": (ValueError, "found 'heads'", lambda: of_heads.prefill(**mine, capacity=9)),
        "packed": (
            TypeError,
            "segment_ids belong to a full call",
            lambda: attn.prefill(
                **mine,
                capacity=9,
                segment_ids=torch.zeros(2, mine["k"].shape[1], dtype=torch.int64),
            ),
        ),
        "packed new tokens": (
            TypeError,
            "cu_seqlens belong to a full call",
            lambda: attn.extend(cache, **new, cu_seqlens=[0, 1]),
        ),
        "not causal": (
            ValueError,
            "is not causal, so it can not have a cache",
            lambda: context_parallel("softmax[causal=false]", mesh, layout="contiguous").prefill(
                **mine, capacity=9
            ),
        ),
        "no capacity": (TypeError, "missing capacity", lambda: attn.prefill(**mine)),
        "a capacity that is none": (
            ValueError,
            "capacity must be a whole number, 1 or above; found 2.5",
            lambda: attn.prefill(**mine, capacity=2.5),
        ),
        "a capacity too small": (
            ValueError,
            "capacity must be 8 or above",
            lambda: attn.prefill(**mine, capacity=7),
        ),
        "capacities that differ": (
            ValueError,
            "all processes must call the same",
            lambda: attn.prefill(**mine, capacity=differs(9, 10)),
        ),
        "a cache of tokens before": (
            ValueError,
            "cache must be of states only",
            lambda: attn.prefill(**mine, capacity=12, cache=tokens),
        ),
        "a divided cache before": (
            TypeError,
            "cache must be an ordinary Cache",
            lambda: linear.prefill(**its, cache=states),
        ),
        "no cache before on one process": (
            TypeError,
            "process 1: cache must be an ordinary Cache",
            lambda: linear.prefill(**its, cache=differs(begun, 3)),
        ),
        "a cache of another mechanism before": (
            ValueError,
            "the cache is of another mechanism",
            lambda: linear.prefill(**its, cache=whole_one),
        ),
        "states and tokens before": (
            ValueError,
            "that of ccq has tokens",
            lambda: both.prefill(
                **mine,
                contraction=mine["q"][..., 0].abs().clamp(max=1),
                capacity=12,
                cache=both.mechanism.init_cache(**mine, contraction=mine["q"][..., 0], capacity=12),
            ),
        ),
        "states of other heads before": (
            ValueError,
            "has shape",
            lambda: linear.prefill(
                **its, cache=begun._replace(store={n: a[:, :1] for n, a in begun.store.items()})
            ),
        ),
        "a whole cache": (
            TypeError,
            "must be a DividedCache from prefill; found Cache",
            lambda: attn.extend(whole_one, **new),
        ),
        "a cache of another mechanism": (
            ValueError,
            "the cache must be of the mechanism 'lucid'; it is of 'gated_delta'",
            lambda: attn.extend(states, **new),
        ),
        "a cache of another mesh": (
            ValueError,
            "the cache must be of the mesh",
            lambda: elsewhere.extend(cache, **new),
        ),
        "a cache of another layout": (
            ValueError,
            "the cache must be of the layout 'cyclic[block=4]'; it is of 'contiguous'",
            lambda: cyclic.extend(cache, **new),
        ),
        "new tokens that are divided": (
            ValueError,
            "all processes must call the same",
            lambda: (
                attn.extend(cache, q, differs(k, torch.cat([k, k], 1)), v)
                if not rank
                else attn.extend(cache, *(torch.cat([x, x], 1) for x in (q, k, v)))
            ),
        ),
        "another verb on one process": (
            ValueError,
            "all processes must call the same",
            lambda: attn.extend(cache, **new) if rank else attn.prefill(**mine, capacity=12),
        ),
        "lengths that differ": (
            ValueError,
            "all processes must call the same",
            lambda: attn.extend(cache, **new, lengths=differs([1, 1], [1, 0])),
        ),
        "lengths out of range": (
            ValueError,
            "lengths must lie between 0 and t = 1",
            lambda: attn.extend(cache, **new, lengths=[1, 2]),
        ),
        "other heads": (
            ValueError,
            "these inputs need",
            lambda: attn.extend(cache, q, k[..., :2, :1, :], v[..., :1, :]),
        ),
        "another dtype": (
            TypeError,
            "has dtype float64; these inputs need float32",
            lambda: attn.extend(cache, q.float(), k.float(), v.float()),
        ),
        "a missing input": (TypeError, "missing v", lambda: attn.extend(cache, q, k)),
        "a key mask that is not kept": (
            ValueError,
            "this cache stores no key_mask",
            lambda: attn.extend(cache, **new, key_mask=ones),
        ),
        "more than the capacity": (
            ValueError,
            "capacity exceeded: the cache holds at most 12 tokens",
            lambda: attn.extend(cache, *(torch.cat([x] * 5, 1) for x in (q, k, v))),
        ),
        "a gradient": (
            ValueError,
            "the extension of a divided cache has no gradient",
            lambda: attn.extend(cache, q.clone().requires_grad_(), k, v),
        ),
        "to no process": (
            ValueError,
            "to must be a process, 0 to 1, or None for all; found 2",
            lambda: redistribute(cache, to=2),
        ),
        "a smaller capacity": (
            ValueError,
            "capacity must be 8 or above",
            lambda: redistribute(cache, capacity=4),
        ),
        "to different processes": (
            ValueError,
            "all processes must call the same",
            lambda: redistribute(cache, to=rank),
        ),
        "no divided cache": (
            TypeError,
            "the cache must be a DividedCache from prefill; found Cache",
            lambda: redistribute(whole_one),
        ),
        "an unknown verb": (ValueError, "found 'vjp'", lambda: attn.explain(**mine, verb="vjp")),
    }
    for name, (kind, words, call) in cases.items():
        yield (
            f"refused: {name}",
            lambda k=kind, w=words, c=call: require_refused(mesh, k, w, c),
        )


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


def an_error_of_one_is_raised_by_all(mesh, module, name, expression, number):
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


def cases(mesh):
    """All of them in two processes, and some of each kind in three and four."""
    world, cyclic = mesh.size(), "cyclic[block=2]"
    if world == 1:
        for expression in ("lucid", "gated_delta"):
            yield expression, lambda e=expression: decoded(e, mesh, "contiguous")
        yield "gated_delta, states", lambda: differentiated("gated_delta", mesh)
        return
    of_tokens, of_states = TOKENS, STATES
    if world > 2:
        of_tokens, of_states = TOKENS[world % 2 :: 2], STATES[world % 2 :: 4]
    for number, expression in enumerate(of_tokens):
        by = ("contiguous", "zigzag", cyclic)[(number + world) % 3]
        yield f"{expression}, {by}", lambda e=expression, b=by: decoded(e, mesh, b)
    for expression in (*of_states, *BOTH):
        yield expression, lambda e=expression: decoded(e, mesh, "contiguous")
    for expression in ("softmax", "laser", "lucid[beta=true]", "differential")[:: world - 1]:
        for masks in (("lengths",), ("key_mask",), ("lengths", "key_mask")):
            by = "zigzag" if masks == ("lengths",) else cyclic
            yield (
                f"{expression}, {' and '.join(masks)}",
                lambda e=expression, k=masks, b=by: decoded(e, mesh, b, masks=k),
            )
    for expression in ("gated_delta", "ccq", "ccq(lucid)", "gsa", "delta_product")[:: world - 1]:
        yield (
            f"{expression}, lengths",
            lambda e=expression: decoded(e, mesh, "contiguous", masks=("lengths",)),
        )
    for expression in ("gated_delta", "ccq(lucid)", "gsa")[:: world - 1]:
        yield (
            f"{expression}, key_mask",
            lambda e=expression: decoded(e, mesh, "contiguous", masks=("lengths", "key_mask")),
        )
    few = {"masks": ("lengths",), "limits": (2, 0)}
    for expression in ("lucid", "laser"):
        yield (
            f"{expression}, no token on the last process",
            lambda e=expression: decoded(e, mesh, "contiguous", **few),
        )
    yield "lucid, one key head", lambda: decoded("lucid", mesh, "zigzag", heads=(6, 1))
    for expression in of_states:
        yield f"{expression}, from a state to a state", lambda e=expression: differentiated(e, mesh)
    yield (
        "gated_delta, from a state, lengths",
        lambda: differentiated("gated_delta", mesh, lengths=True),
    )
    if world < 4:
        yield "lucid, donated", lambda: decoded("lucid", mesh, cyclic, donate=True)
        ragged = {"masks": ("lengths",), "donate": True}
        yield "ccq(lucid), donated", lambda: decoded("ccq(lucid)", mesh, "contiguous", **ragged)
        for kind in ("duplicate", "zero"):
            yield f"lucid, {kind}", lambda k=kind: decoded("lucid", mesh, "zigzag", kind=k)
    single = {"dtype": torch.float32, "tolerance": 1e-5}
    for expression in ("softmax", "laser", "lucid", "gated_delta", "ccq(lucid)")[:: world - 1]:
        yield (
            f"{expression}, float32",
            lambda e=expression: decoded(e, mesh, "contiguous", **single),
        )
    yield (
        "gated_delta, from a state, float32",
        lambda: differentiated("gated_delta", mesh, **single),
    )
    if world in (2, 4):
        yield "bytes", lambda: bytes_are_counted(mesh)
    if world == 2:
        for expression in ("softmax", "laser", "lucid", "gated_delta"):
            by = "contiguous" if expression == "gated_delta" else "zigzag"
            yield (
                f"{expression}, bfloat16",
                lambda e=expression, b=by: in_bfloat16(mesh, e, b),
            )
        yield "as DTensors", lambda: as_dtensors(mesh)
        yield from refusals(mesh)
        yield "donated", lambda: donated(mesh)
        for module, name, expression, numbers in (
            (ring_reads, "with_lse", "differential", (1, 2, 3, 4)),
            (solve_cache, "with_lse", "lucid", (1,)),
            (states_cache, "with_states", "ccq(lucid)", (1,)),
            (states_cache, "with_states", "gated_delta", (1,)),
        ):
            for number in numbers:
                yield (
                    f"error {number} in {name} of {expression}",
                    lambda f=(module, name, expression, number): an_error_of_one_is_raised_by_all(
                        mesh, *f
                    ),
                )


def main(rank, world, folder):
    run(cases, rank, world, folder)
