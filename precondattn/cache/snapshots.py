"""Snapshots: what has to be kept of a cache, so that it can go back to the tokens of now.

Histories of tokens are cropped, so a snapshot has copies of states and of rewritten rows only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from precondattn.arrays import Array, fresh, is_traced, writes_in_place
from precondattn.cache.crop import cropped, fixed_buffers
from precondattn.cache.integers import Integers, entries

if TYPE_CHECKING:
    from precondattn.cache.cache import Cache


class Snapshot(NamedTuple):
    """The lengths of a cache (b,), and copies of its buffers that can not be cropped."""

    length: Array
    store: dict[str, Array]


def snapshot(cache: Cache) -> Snapshot:
    copies = {name: fresh(cache.store[name]) for name in fixed_buffers(cache)}
    return Snapshot(fresh(cache.length), copies)


def restore(cache: Cache, earlier: Snapshot, *, donate: bool) -> Cache:
    if not isinstance(earlier, Snapshot):
        raise TypeError(
            f"restore: a Snapshot from snapshot() expected; found {type(earlier).__name__}"
        )
    shapes = [
        {"length": tuple(length.shape), **{name: tuple(store[name].shape) for name in store}}
        for length, store in (
            (earlier.length, earlier.store),
            (cache.length, {name: cache.store[name] for name in fixed_buffers(cache)}),
        )
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"restore: the snapshot is of another cache: its arrays have the shapes {shapes[0]}, "
            f"and {shapes[1]} are needed"
        )
    known = None if is_traced(earlier.length) else entries(earlier.length)
    buffers = dict(cache.store)
    new = cropped(cache, Integers(earlier.length, known), "restore", donate)
    for name, kept in earlier.store.items():
        if donate and writes_in_place(kept):
            buffers[name][...] = kept
            new.store[name] = buffers[name]
        else:
            new.store[name] = fresh(kept)
    return new
