"""Snapshots, which record the tokens of a cache so that it can go back to them.

Histories of tokens can be cropped, so only states, rewritten rows and windows are copied.
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn.arrays import Array, fresh, is_traced, writes_in_place
from precondattn.cache.conversion import ordinary, with_writable_buffers
from precondattn.cache.crop import cropped, fixed_buffers
from precondattn.cache.integers import Integers, entries
from precondattn.cache.kept import without_kept
from precondattn.cache.kinds import C, CacheLike, empty_if_donated, holding
from precondattn.cache.windows import reach_of


class Snapshot(NamedTuple):
    """The lengths of a cache (b,), and copies of the buffers that can not be cropped."""

    length: Array
    store: dict[str, Array]


def snapshot(cache: CacheLike) -> Snapshot:
    copies = {name: fresh(cache.store[name]) for name in _copied(cache)}
    return Snapshot(fresh(cache.length), copies)


def _copied(cache: CacheLike) -> list[str]:
    """The names of the buffers that a snapshot copies; all buffers of a window."""
    return fixed_buffers(cache) if reach_of(cache) is None else [*cache.store]


def restore(cache: C, earlier: Snapshot, *, donate: bool) -> C:
    if not isinstance(earlier, Snapshot):
        raise TypeError(
            f"restore: a Snapshot from snapshot() expected; found {type(earlier).__name__}"
        )
    shapes = [
        {"length": tuple(length.shape), **{name: tuple(store[name].shape) for name in store}}
        for length, store in (
            (earlier.length, earlier.store),
            (cache.length, {name: cache.store[name] for name in _copied(cache)}),
        )
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"restore: the snapshot is of another cache: its arrays have the shapes {shapes[0]}, "
            f"and {shapes[1]} are needed"
        )
    whole, cache = cache, ordinary(without_kept(cache))
    cache = with_writable_buffers(cache) if donate else cache
    known = None if is_traced(earlier.length) else entries(earlier.length)
    buffers = dict(cache.store)
    try:
        if reach_of(cache) is None:
            new = cropped(cache, Integers(fresh(earlier.length), known), "restore", donate)
        else:
            new = holding(cache, fresh(earlier.length), {})
    finally:
        empty_if_donated(whole, cache)
    if donate:
        whole.store.clear()
    for name, kept in earlier.store.items():
        if donate and writes_in_place(kept):
            buffers[name][...] = kept
            new.store[name] = buffers[name]
        else:
            new.store[name] = fresh(kept)
    return new
