"""Saving: a cache as a flat dict of arrays, which every format of arrays can store."""

from __future__ import annotations

from collections.abc import Mapping

from precondattn.arrays import Array, Arrays, fresh, in_order, library_of
from precondattn.cache.kinds import CacheLike, Kind, Kinds, kinds_of

LENGTH = "length"
BETWEEN = ": "
"""Between the kind of a buffer and its name, as in `"wide tokens: rms(k)"`."""


def state_dict(cache: CacheLike) -> Arrays:
    buffers = {
        f"{kind}{BETWEEN}{name}": in_order(cache.store[name])
        for name, kind in kinds_of(cache).items()
    }
    return {LENGTH: fresh(cache.length), **buffers}


def from_state_dict(arrays: Mapping[str, Array]) -> tuple[Array, Arrays, Kinds]:
    """The three parts of a cache."""
    missing = [] if LENGTH in arrays else [LENGTH]
    unknown = [key for key in arrays if key != LENGTH and not _is_key(key)]
    if missing or unknown:
        raise ValueError(
            f"from_state_dict: a dict from state_dict() expected, with {LENGTH!r} and keys such "
            f"as 'tokens: k'; missing {missing}, unknown {unknown}"
        )
    for key, array in arrays.items():
        if library_of(array) is None:
            raise TypeError(
                f"from_state_dict: {key!r} must be an array; found {type(array).__name__}"
            )
    store: Arrays = {}
    kinds: Kinds = {}
    for key, array in arrays.items():
        text, _, name = key.partition(BETWEEN)
        if key == LENGTH:
            continue
        kind = Kind.read(text)
        store[name] = kind.from_memory_order(in_order(kind.in_memory_order(array)))
        kinds[name] = {text: ()}
    return fresh(arrays[LENGTH]), store, kinds


def _is_key(key: str) -> bool:
    text, between, name = key.partition(BETWEEN)
    try:
        Kind.read(text)
    except ValueError:
        return False
    return bool(between and name)
