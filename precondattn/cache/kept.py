"""Kept states: the states at earlier lengths, to which `crop` can go back.

A cache from `extend(..., keep=n)` or `extend(..., states_every=m)` has two more buffers for the
states at earlier lengths, besides every state S after all tokens:

    kept S    (b, n, …)    the states after the first `from`, `from` + m, … tokens of each sequence,
    kept from (b,)         the number `from` for each sequence,

where m is 1 after `keep`. Rows for more tokens than the sequence has are not valid.
"""

from __future__ import annotations

from precondattn.arrays import Array, Arrays, as_index, fresh, namespace, placement, take_tokens
from precondattn.cache.integers import entries
from precondattn.cache.kinds import (
    KEPT,
    REWRITTEN,
    STATE,
    WINDOW,
    C,
    CacheLike,
    Kind,
    holding,
    kinds_of,
)

OF = "kept "
FROM = "kept from"
"""The name of the buffer (b,) with the length of the first kept state."""


def states_in(cache: CacheLike) -> list[str]:
    """The names of the buffers that are states."""
    return [name for name, kind in kinds_of(cache).items() if kind.rows == STATE]


def without_way_back(cache: CacheLike) -> list[str]:
    """The names of the buffers that can not go back: rewritten rows, and a window's buffers."""
    kinds = kinds_of(cache).items()
    window = [name for name, kind in kinds if kind.rows == WINDOW]
    return window or [name for name, kind in kinds if kind.rows == REWRITTEN]


def with_kept(cache: C, states: Arrays, first: Array, every: int) -> C:
    """The cache with kept states (b, n, …), after `first` (b,) tokens and each `every` more."""
    store, kinds = dict(cache.store), dict(cache.kinds)
    of_cache = kinds_of(cache)
    for name, rows in states.items():
        store[OF + name] = rows
        kinds[OF + name] = {str(Kind(KEPT, of_cache[name].is_wide)): ()}
    store[FROM], kinds[FROM] = first, {str(Kind(KEPT, every=every)): ()}
    return type(cache)(cache.length, store, kinds)


def without_kept(cache: C) -> C:
    """The cache without kept states; the cache itself if it has none."""
    if FROM not in cache.store:
        return cache
    names = [name for name, kind in kinds_of(cache).items() if kind.rows != KEPT]
    store = {name: cache.store[name] for name in names}
    return type(cache)(cache.length, store, {name: cache.kinds[name] for name in names})


def every_of(cache: CacheLike) -> int:
    """The number of tokens from one kept state to the next."""
    return kinds_of(cache)[FROM].every


def rows_of(cache: CacheLike) -> int:
    """The number of kept states of each sequence."""
    return next((int(cache.store[OF + name].shape[1]) for name in states_in(cache)), 0)


def with_rows(cache: C, count: int) -> C:
    """The cache with `count` rows of kept states; added rows are not valid."""
    store = dict(cache.store)
    for name in states_in(cache):
        kept = store[OF + name]
        missing = (kept.shape[0], count - kept.shape[1], *kept.shape[2:])
        zeros = namespace(kept).zeros(missing, dtype=kept.dtype, **placement(kept))
        store[OF + name] = namespace(kept).concat([kept, zeros], axis=1)
    return holding(cache, cache.length, store)


def checkpoints(cache: CacheLike) -> list[list[int]]:
    """The lengths at which states are kept, for each sequence."""
    if FROM not in cache.store:
        return [[] for _ in range(cache.length.shape[0])]
    every, count = every_of(cache), rows_of(cache)
    pairs = zip(entries(cache.store[FROM]), entries(cache.length), strict=True)
    return [
        [n for n in range(first, first + every * count, every) if n <= last]
        for first, last in pairs
    ]


def is_kept(cache: CacheLike, length: Array) -> Array:
    """Whether the cache has the states after the first `length` (b,) tokens."""
    after = length - cache.store[FROM]
    return (length == cache.length) | ((after >= 0) & (after % every_of(cache) == 0))


def states_at(cache: CacheLike, length: Array) -> Arrays:
    """The kept or last states after the first `length` (b,) tokens."""
    xp, states = namespace(length), {}
    row = (length - cache.store[FROM]) // every_of(cache)
    is_last = length == cache.length
    for name in states_in(cache):
        last, kept = cache.store[name], cache.store[OF + name]
        if not kept.shape[1]:
            states[name] = fresh(last)
            continue
        place = as_index(xp.clip(row, 0, kept.shape[1] - 1)[:, None])  # It may be invalid.
        at_last = xp.reshape(is_last, (-1, *(1,) * (last.ndim - 1)))
        states[name] = xp.where(at_last, last, take_tokens(kept, place)[:, 0, ...])
    return states
