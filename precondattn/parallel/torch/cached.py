"""Divided calls with a cache: a prefill of divided tokens, and new tokens on all processes.

The leaves are divided as in `ways.py`. What each process keeps depends on the leaf:

    local   nothing                                                          (`tokens.py`)
    ring    the keys and values of its tokens                                (`ring.py`)
    solve   the keys and solved values of its tokens                         (`solve.py`)
    states  the states after all tokens, of which each computes the new ones (`states.py`)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import ModuleType

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from precondattn.algebra.declaration import Inputs, Pattern
from precondattn.algebra.mechanism import Leaf, Mechanism, leaf_of
from precondattn.cache import KEY_MASK, Cache
from precondattn.cache.kinds import holding
from precondattn.execution.array_checks import values_of
from precondattn.execution.cache_checks import keeps_tokens
from precondattn.execution.input_names import shapes_of
from precondattn.execution.masks import zero_padding
from precondattn.given import at_least
from precondattn.parallel import ways
from precondattn.parallel.torch import ring, solve, states
from precondattn.parallel.torch.cache_arguments import NewTokens
from precondattn.parallel.torch.call import DividedCall
from precondattn.parallel.torch.divided_cache import (
    DividedCache,
    extended,
    filled,
    rows_needed,
    tokens_stored,
)
from precondattn.parallel.torch.processes import MeshProcesses, tried
from precondattn.parallel.torch.step import DividedStep, of_all_processes
from precondattn.parallel.torch.tokens import alone, masks_of, positions_of
from precondattn.parallel.ways import DividedPiece, Way, way_of

CACHED: Mapping[Way, ModuleType] = {
    ways.RING: ring,
    ways.SOLVE: solve,
    ways.STATES: states,
}


def prefill(
    call: DividedCall, mesh: DeviceMesh, capacity: int | None, begin: Cache | None
) -> tuple[Tensor, DividedCache]:
    """The output of this process's tokens, and the cache of all tokens.

    `begin` has the states before the first token.
    """
    processes = call.processes
    masks = processes.together(lambda: masks_of(call))
    cache = processes.together(lambda: _empty(call, mesh, capacity, begin))
    rank, keys = processes.rank, call.mechanism.program.slot_keys
    kept: dict[str, Tensor] = {}

    def output_of(number: int, way: Way, piece: DividedPiece) -> Tensor:
        begins = None
        if way is ways.LOCAL:
            return alone(piece)
        if begin is not None:
            begins = {slot: begin.store[key] for slot, key in keys[number].items()}
        of_leaf: Tensor
        of_leaf, of_slots = CACHED[way].prefilled(piece, begins)
        for slot, tensor in of_slots.items():  # Leaves that share a buffer store the same in it.
            kept.setdefault(keys[number][slot], tensor)
        return of_leaf

    out: Tensor = ways.computed(call, call.bound.inputs, masks, output_of, processes.together)
    if masks.valid is not None and KEY_MASK in cache.token_buffers:
        kept[KEY_MASK] = masks.valid[rank]
    positions = positions_of(call.parts, rank, processes.device)
    return out, processes.together(lambda: filled(cache, kept, positions, rank))


def extend(
    new: NewTokens, processes: MeshProcesses, cache: DividedCache, *, donate: bool
) -> tuple[Tensor, DividedCache]:
    """The output of the new tokens, and the cache with them."""
    program, rank, rows = cache.mechanism.program, processes.rank, cache.rows_of(processes.rank)
    values = zero_padding(new.inputs, cache.mechanism.inputs, new.within, new.valid)
    # Without rows that are unused in all sequences.
    buffers, names = cache.part.store, cache.token_buffers
    store = {name: x[:, :rows] if name in names else x for name, x in buffers.items()}
    seen = store.pop(KEY_MASK, None)
    if cache.held and set(cache.held[rank]) != {rows}:
        length = cache.part.length
        within = torch.arange(rows, device=length.device) < length[:, None]
        seen = within if seen is None else seen & within
    kept: dict[str, Tensor] = {}
    error: Exception | None = None
    for leaf_call, keys in zip(program.calls, program.slot_keys, strict=True):
        way, leaf = way_of(leaf_call.leaf), leaf_of(leaf_call)
        assert way is not None  # The prefill has checked it.
        inputs = {name: values[value] for name, value in leaf_call.arguments}
        past = {slot: store[key] for slot, key in keys.items()}
        step, parts, result = DividedStep(leaf, inputs, past, rows, seen, new), None, None
        if way in (ways.RING, ways.SOLVE):
            parts = of_all_processes(processes, step, CACHED[way], error)
        if error is None:
            result, error = tried(partial(_stepped, way, step, parts))
        if result is None:  # The next exchange raises the error on all processes.
            values[leaf_call.out] = _like_output(leaf, inputs)
            continue
        values[leaf_call.out], of_slots = result
        for slot, tensor in of_slots.items():
            kept.setdefault(keys[slot], tensor)
    if KEY_MASK in cache.token_buffers:
        shape = new.sizes["b"], new.sizes["t"]
        everything = torch.ones(shape, dtype=torch.bool, device=processes.device)
        kept[KEY_MASK] = everything if new.valid is None else new.valid

    def finished() -> DividedCache:
        if error is not None:
            raise error
        return extended(cache, kept, new.counts, rank, donate=donate)

    after = processes.together(finished)
    of_out = Inputs(**{program.out: program.output})
    out = {program.out: values[program.out]}
    return zero_padding(out, of_out, new.within, new.valid)[program.out], after


def _empty(
    call: DividedCall, mesh: DeviceMesh, capacity: int | None, begin: Cache | None
) -> DividedCache:
    """The cache of a prefill, with the numbers of tokens set, before the rows are written."""
    processes, mechanism = call.processes, call.mechanism
    b, total, valid = call.sizes["b"], sum(call.tokens["t"]), call.bound.masks.get("lengths")
    counts = [total] * b if valid is None else torch.as_tensor(valid, device="cpu").tolist()
    before = [0] * b if begin is None else begin.length.tolist()
    lengths = tuple(n + new for n, new in zip(before, counts, strict=True))
    has_tokens = keeps_tokens(mechanism)
    stored = tokens_stored(call.parts, counts, processes.devices)
    rows = None
    if has_tokens:
        capacity = at_least(1, "capacity", capacity)
        if max(lengths) > capacity:
            raise ValueError(
                f"capacity must be {max(lengths)} or above, the number of tokens of the longest "
                f"sequence; found {capacity}"
            )
        rows = rows_needed(capacity, stored[processes.rank], processes.devices)
    part = mechanism.init_cache(
        **call.bound.inputs, capacity=rows, key_mask="key_mask" in call.bound.masks
    )
    of_process = stored[processes.rank] if has_tokens else lengths
    count = torch.tensor(of_process, dtype=torch.int32, device=processes.device)
    position = torch.zeros(b, rows or 0, dtype=torch.int32, device=processes.device)
    layout = str(call.order)
    return DividedCache(
        mechanism,
        mesh,
        layout,
        holding(part, count, part.store),
        position,
        stored if has_tokens else (),
        lengths,
        capacity if has_tokens else None,
    )


def _like_output(leaf: Leaf, inputs: Mapping[str, Tensor]) -> Tensor:
    """A tensor of the shape and dtype of a leaf's output."""
    like: Tensor = values_of(inputs)
    sizes = leaf.inputs.sizes(str(leaf), shapes_of(inputs))
    return like.new_empty(Pattern.read(leaf.output).shape(sizes))


def _stepped(way: Way, step: DividedStep, parts: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of the new tokens, and what the leaf keeps of them by slot name."""
    if way is ways.LOCAL:
        return step.leaf(**step.inputs, backend=step.new.backend), {}
    out, of_slots = CACHED[way].stepped(step, parts)
    return out, of_slots


def refusal(mechanism: Mechanism) -> str | None:
    """The reason why a divided call can not fill a cache; None if it can."""
    for leaf in mechanism.program.leaves:
        way = way_of(leaf)
        if way is not None and way not in (ways.LOCAL, *CACHED):
            return f"keeps no cache of {leaf}, whose keys are gathered"
    return None
