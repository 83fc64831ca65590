"""Divided calls with a cache: a prefill of divided tokens, and new tokens on all processes.

The leaves are divided as in `ways.py`. What each process keeps depends on the leaf:

    local   nothing                                                          (`tokens.py`)
    ring    the keys and values of its tokens                                (`ring.py`)
    solve   the keys and solved values of its tokens                         (`solve.py`)
    states  the states after all tokens, of which each computes the new ones (`states.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import ModuleType

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from precondattn.algebra.declaration import Inputs
from precondattn.algebra.mechanism import Mechanism, leaf_of
from precondattn.arrays import Shape
from precondattn.cache import KEY_MASK, Cache
from precondattn.cache.kinds import holding
from precondattn.execution.cache_checks import keeps_tokens
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
from precondattn.parallel.torch.step import DividedStep, PartExchanges
from precondattn.parallel.torch.tokens import alone, masks_of, positions_of
from precondattn.parallel.ways import DividedPiece, Way, way_of

Steps = Callable[[int, Mapping[str, Tensor]], DividedStep]

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
    mechanism, rank = cache.mechanism, processes.rank
    values = zero_padding(new.inputs, mechanism.inputs, new.within, new.valid)
    parts, steps = _parts(new, processes), _steps(cache, new, rank)
    kept: dict[str, Tensor] = {}
    error: Exception | None = None
    for number, leaf_call in enumerate(mechanism.program.calls):
        step, result, of_all = steps(number, values), None, None
        shape = _part_shape(step)
        if shape is not None:
            of_all = parts.of_all(shape, partial(CACHED[_way(step)].part, step), error)
        if error is None:
            result, error = tried(partial(_stepped, step, of_all))
        if result is None:  # The next exchange raises the error on all processes.
            values[leaf_call.out] = DividedCall.like_output(step.leaf, step.inputs)
            continue
        values[leaf_call.out], of_slots = result
        for slot, tensor in of_slots.items():
            kept.setdefault(mechanism.program.slot_keys[number][slot], tensor)
    if KEY_MASK in cache.token_buffers:
        shape = new.sizes["b"], new.sizes["t"]
        everything = torch.ones(shape, dtype=torch.bool, device=processes.device)
        kept[KEY_MASK] = everything if new.valid is None else new.valid

    def finished() -> DividedCache:
        if error is not None:
            raise error
        return extended(cache, kept, new.counts, rank, donate=donate)

    after = processes.together(finished)
    name = mechanism.program.out
    of_out = Inputs(**{name: mechanism.program.output})
    return zero_padding({name: values[name]}, of_out, new.within, new.valid)[name], after


def bytes_of_extension(
    new: NewTokens, processes: MeshProcesses, cache: DividedCache
) -> dict[str, int]:
    """The bytes that this process sends in `extend`, by array and value of the program."""
    parts, steps = _parts(new, processes), _steps(cache, new, processes.rank)
    shapes = _shapes(cache.mechanism, steps, new.inputs)
    return {f"parts for {out}": parts.bytes_sent(shape) for out, shape in shapes if shape}


def bytes_of_states(call: DividedCall) -> dict[str, int]:
    """The bytes that this process sends after a prefill, of the last states, by array."""
    program, others = call.mechanism.program, call.processes.devices - 1
    empty = call.mechanism.init_cache(**call.bound.inputs, capacity=1).store
    sent: dict[str, int] = {}
    for leaf_call, keys in zip(program.calls, program.slot_keys, strict=True):
        slots = [slot for slot in leaf_call.leaf.slots() if not slot.kind.has_tokens]
        states = [empty[keys[slot.name]] for slot in slots]
        if states and call.processes.rank == others:  # The last process broadcasts them.
            numbers = sum(state.numel() * state.dtype.itemsize for state in states)
            sent[f"last states for {leaf_call.out}"] = others * numbers
    return sent


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


def _parts(new: NewTokens, processes: MeshProcesses) -> PartExchanges:
    is_double = any(x.dtype == torch.float64 for x in new.inputs.values())
    return PartExchanges(processes, torch.float64 if is_double else torch.float32)


def _steps(cache: DividedCache, new: NewTokens, rank: int) -> Steps:
    """The leaf calls of the program on new tokens, by number, with the values before them."""
    rows, buffers, program = cache.rows_of(rank), cache.part.store, cache.mechanism.program
    # Without rows that are unused in all sequences.
    store = {n: x[:, :rows] if n in cache.token_buffers else x for n, x in buffers.items()}
    seen = store.pop(KEY_MASK, None)
    if cache.held and set(cache.held[rank]) != {rows}:
        length = cache.part.length
        within = torch.arange(rows, device=length.device) < length[:, None]
        seen = within if seen is None else seen & within

    def step(number: int, values: Mapping[str, Tensor]) -> DividedStep:
        call = program.calls[number]
        past = {slot: store[key] for slot, key in program.slot_keys[number].items()}
        inputs = {name: values[value] for name, value in call.arguments}
        return DividedStep(leaf_of(call), inputs, past, rows, seen, new)

    return step


def _shapes(
    mechanism: Mechanism, steps: Steps, values: Mapping[str, Tensor], start: int = 0
) -> Iterator[tuple[str, Shape | None]]:
    """The shapes that the leaf calls from number `start` on exchange, by output value."""
    like = {name: x.to("meta") for name, x in values.items()}
    for number, leaf_call in enumerate(mechanism.program.calls):
        if number >= start:
            step = steps(number, like)
            yield leaf_call.out, _part_shape(step)
            like[leaf_call.out] = DividedCall.like_output(step.leaf, step.inputs)


def _part_shape(step: DividedStep) -> Shape | None:
    """The shape of what processes exchange for a leaf; None for nothing."""
    way, shape = _way(step), None
    if way in (ways.RING, ways.SOLVE):
        shape = CACHED[way].part_shape(step)
    return shape


def _stepped(step: DividedStep, parts: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of the new tokens, and what the leaf keeps of them by slot name."""
    if _way(step) is ways.LOCAL:
        return step.leaf(**step.inputs, backend=step.new.backend), {}
    out, of_slots = CACHED[_way(step)].stepped(step, parts)
    return out, of_slots


def refusal(mechanism: Mechanism) -> str | None:
    """The reason why a divided call can not fill a cache; None if it can."""
    for leaf in mechanism.program.leaves:
        way = way_of(leaf)
        if way is not None and way not in (ways.LOCAL, *CACHED):
            return f"keeps no cache of {leaf}, whose keys are gathered"
    return None


def _way(step: DividedStep) -> Way:
    way = way_of(step.leaf)
    assert way is not None  # It has been checked.
    return way
