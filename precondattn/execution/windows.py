"""Extending the cache of a window, as an ordinary cache with room for the new tokens.

ordinary = (length − first tokens, buffers);  extend it;  drop the rows that no longer fit
"""

from __future__ import annotations

from precondattn.algebra.call import Call
from precondattn.algebra.piece import Piece
from precondattn.arrays import cast, fresh, is_traced, namespace, writes_in_place
from precondattn.cache import KEY_MASK, Cache
from precondattn.cache.capacity import grown
from precondattn.cache.integers import entries
from precondattn.cache.kinds import TOKENS, Kind
from precondattn.cache.windows import FIRST, dropped, moved_to_front, rows_of


def is_window(cache: Cache) -> bool:
    return isinstance(cache, Cache) and FIRST in cache.store


def ordinary(call: Call) -> Cache:
    """A cache without a window that has the same tokens, and room for the new ones."""
    mechanism, cache = call.mechanism, call.cache
    length, tokens_before = cache.length, cache.store[FIRST]
    # A negative length marks an invalid sequence, which stays invalid.
    local = namespace(length).where(length < 0, length, length - cast(tokens_before, length.dtype))
    store = {name: buffer for name, buffer in cache.store.items() if name != FIRST}
    kinds = _kinds(mechanism)
    if not set(mechanism.program.slots) <= set(store) <= set(kinds):
        return Cache(length, store)  # A cache of another mechanism, which `extend` refuses.
    reach = mechanism.program.reach
    rows = next(a.shape[1] for name, a in store.items() if kinds[name].has_tokens)
    if reach is None or rows != rows_of(reach):
        window = "no window" if reach is None else f"a window of {reach + 1}"
        raise ValueError(
            f"{mechanism}: the cache is of another mechanism: it holds the last tokens only, in "
            f"{rows} rows, and this mechanism has {window}"
        )
    own_kinds = {name: {str(kinds[name]): ()} for name in store}
    plain = Cache(cast(local, length.dtype), store, own_kinds)
    inputs = {**dict(zip(mechanism.inputs, call.arrays, strict=False)), **call.named}
    new = 0  # No input has tokens, which `extend` then refuses.
    for name, pattern in mechanism.inputs.items():
        shape, axis = getattr(inputs.get(name), "shape", ()), pattern.time_axis
        if axis is not None and len(shape) == len(pattern.axes):
            new = shape[axis]
            break
    fits = not is_traced(local) and max(entries(local), default=0) + new <= rows
    return plain if fits else grown(plain, rows + new)


def _kinds(mechanism: Piece) -> dict[str, Kind]:
    """The kinds of the buffers that the mechanism's cache may have."""
    slots = {name: slot.kind for name, (slot, _) in mechanism.program.slots.items()}
    return {**slots, KEY_MASK: Kind(TOKENS)}


def moved_on(mechanism: Piece, cache: Cache, plain: Cache, *, donate: bool) -> Cache:
    """The cache of a window, after the ordinary cache was extended to `plain`."""
    reach, kinds = mechanism.program.reach, _kinds(mechanism)
    assert reach is not None  # `ordinary` has checked it.
    length, tokens_before, rows = plain.length, cache.store[FIRST], rows_of(reach)
    store = {**plain.store, FIRST: tokens_before if donate else fresh(tokens_before)}
    capacity = next(a.shape[1] for name, a in plain.store.items() if kinds[name].has_tokens)
    xp = namespace(length)
    is_invalid = (length < 0) | (length > capacity)
    position = cast(
        xp.where(is_invalid, -1, length + cast(tokens_before, length.dtype)), length.dtype
    )
    if capacity > rows:
        drop = dropped(length, reach)
        for name, buffer in plain.store.items():
            if kinds[name].has_tokens:  # States, such as CCQ's, have no rows.
                store[name] = moved_to_front(buffer, kinds[name], length, drop, rows)
        store[FIRST] = tokens_before + cast(drop, tokens_before.dtype)
        if donate and writes_in_place(length, *store.values()):
            for name, buffer in store.items():
                cache.store[name][...] = buffer
            store = cache.store
    return cache._replace(length=position, store={name: store[name] for name in cache.store})
