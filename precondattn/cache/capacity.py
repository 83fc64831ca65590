"""Growing a cache: the same tokens in larger buffers."""

from __future__ import annotations

from precondattn.arrays import cast, fresh, namespace, placement
from precondattn.cache.kinds import (
    C,
    capacity_of,
    holding,
    invalid_length,
    kinds_of,
    refuse_distributed,
)
from precondattn.given import Given, whole_number


def grow(cache: C, given: Given) -> C:
    capacity = whole_number(given)
    if capacity is None:
        raise TypeError(f"grow: capacity must be a whole number; found {given!r}")
    refuse_distributed(cache, "grow")
    now = capacity_of(cache)
    if now is None or capacity == now:
        return cache
    if capacity < now:
        raise ValueError(
            f"grow: capacity must be {now} or above, as the cache holds up to {now} tokens; "
            f"found {capacity}"
        )
    larger = grown(cache, capacity)
    # A sequence that exceeded the old capacity has lost tokens; it stays invalid.
    is_within = cache.length <= now
    length = namespace(cache.length).where(is_within, cache.length, invalid_length(capacity))
    return holding(larger, cast(length, cache.length.dtype), larger.store)


def grown(cache: C, capacity: int) -> C:
    """The cache with a larger capacity, whose unused rows are 0, and the same lengths."""
    kinds, store = kinds_of(cache), {}
    for name, buffer in cache.store.items():
        kind, xp = kinds[name], namespace(buffer)
        if not kind.has_tokens:
            store[name] = fresh(buffer)
            continue
        ordered, axis = kind.in_memory_order(buffer), kind.token_axis(buffer.ndim)
        shape = [*ordered.shape]
        shape[axis] = capacity - shape[axis]
        unused = xp.zeros(tuple(shape), dtype=buffer.dtype, **placement(buffer))
        store[name] = kind.from_memory_order(xp.concat([ordered, unused], axis=axis))
    return holding(cache, cache.length, store)
