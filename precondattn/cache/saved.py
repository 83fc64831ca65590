"""Saving a cache as a flat dict of arrays, which every file format for arrays can store."""

from __future__ import annotations

from precondattn.arrays import fresh, host_array, in_order, library_of, namespace, placement
from precondattn.cache.kinds import CacheLike, Kind, Kinds, kinds_of
from precondattn.frameworks.types import Array, Arrays, ByName
from precondattn.version import __version__, numbers_of

VERSION = "version"
LENGTH = "length"
BETWEEN = ": "
"""The separator between the kind of a buffer and its name, as in `"wide tokens: rms(k)"`."""


def state_dict(cache: CacheLike) -> Arrays:
    xp = namespace(cache.length)
    numbers = list(numbers_of(__version__))
    version = xp.asarray(numbers, dtype=xp.int32, **placement(cache.length))
    buffers = {
        f"{kind}{BETWEEN}{name}": in_order(cache.store[name])
        for name, kind in kinds_of(cache).items()
    }
    return {VERSION: version, LENGTH: fresh(cache.length), **buffers}


def from_state_dict(arrays: ByName) -> tuple[Array, Arrays, Kinds]:
    """The length, the buffers and the kinds of a cache, from a saved dict."""
    missing = [key for key in (VERSION, LENGTH) if key not in arrays]
    unknown = [key for key in arrays if key not in (VERSION, LENGTH) and not _is_key(key)]
    if missing or unknown:
        saved = host_array(arrays[VERSION]) if VERSION in arrays else None
        present = ".".join(map(str, numbers_of(__version__)))
        saved_by = present if saved is None else ".".join(map(str, saved.ravel()))
        hint = f"; precondattn {saved_by} saved it, and this is {__version__}"
        raise ValueError(
            f"from_state_dict: a dict from state_dict() expected, with {VERSION!r}, {LENGTH!r} "
            f"and keys such as 'tokens: k'; missing {missing}, unknown {unknown}"
            f"{'' if saved_by == present else hint}"
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
        if key in (VERSION, LENGTH):
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
