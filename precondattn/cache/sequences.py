"""Operations on the sequences of a cache: reorder, select and concatenate."""

from __future__ import annotations

from collections.abc import Sequence

from precondattn.arrays import (
    as_index,
    cast,
    dtype_name,
    exact_device,
    is_traced,
    library_of,
    namespace,
)
from precondattn.cache.capacity import grow
from precondattn.cache.integers import entries, integers
from precondattn.cache.kept import FROM, rows_of, with_rows
from precondattn.cache.kinds import (
    C,
    CacheLike,
    capacity_of,
    holding,
    invalid_length,
    kinds_of,
    refuse_distributed,
)
from precondattn.given import Given


def reorder(cache: C, indices: Given, verb: str = "reorder") -> C:
    """The cache whose sequence i is `indices[i]`; a traced index out of range makes it invalid."""
    kinds = kinds_of(cache)
    refuse_distributed(cache, verb)
    xp = namespace(cache.length)
    b = cache.length.shape[0]
    index, known = integers(f"{verb}: indices", indices, cache.length)
    outside = [i for i in known or () if not 0 <= i < b]
    if outside:
        raise ValueError(f"{verb}: indices must lie between 0 and {b - 1}; found {outside[0]}")
    if known is None:
        valid = (index >= 0) & (index < b)
        index = xp.where(valid, index, 0)
    index = as_index(index)
    length = xp.take(cache.length, index, axis=0)
    if known is None:
        length = cast(
            xp.where(valid, length, invalid_length(capacity_of(cache))), cache.length.dtype
        )
    store = {}
    for name, buffer in cache.store.items():
        kind = kinds[name]
        taken = xp.take(kind.in_memory_order(buffer), index, axis=0)
        store[name] = kind.from_memory_order(taken)
    return holding(cache, length, store)


def select(cache: C, rows: Given) -> C:
    """The cache of some sequences, each at most once, given by a slice, integers or booleans."""
    b = cache.length.shape[0]
    if isinstance(rows, slice):
        rows = list(range(b)[rows])
    elif isinstance(rows, (list, tuple)):
        if rows and all(isinstance(r, bool) for r in rows):
            rows = _marked(rows, b)
    elif library_of(rows) is not None and dtype_name(rows) == "bool":
        if is_traced(rows):
            raise TypeError(
                "select: rows is a traced mask, and the number of sequences can not depend on it; "
                "pass their indices"
            )
        if tuple(rows.shape) != (b,):
            raise ValueError(f"select: a mask must have shape ({b},); found {tuple(rows.shape)}")
        rows = _marked(entries(rows), b)
    _, known = integers("select: rows", rows, cache.length)
    if known is not None and len(set(known)) < len(known):
        raise ValueError(
            f"select: rows must name each sequence at most once; found {known}; reorder() repeats "
            f"sequences"
        )
    return reorder(cache, rows, "select")


def _marked(mask: Sequence[int], b: int) -> list[int]:
    if len(mask) != b:
        raise ValueError(f"select: a mask must have {b} entries, one for each; found {len(mask)}")
    return [i for i, is_marked in enumerate(mask) if is_marked]


def concatenate(caches: Sequence[C]) -> C:
    """The sequences of all caches in one batch, with the largest of their capacities."""
    first = caches[0]
    if all(FROM in cache.store for cache in caches):
        most = max(map(rows_of, caches))
        caches = [with_rows(cache, most) for cache in caches]
        first = caches[0]
    for i, other in enumerate(caches):
        if _described(first) != _described(other):
            raise ValueError(
                f"concatenate: caches of one mechanism expected, which differ in sequences and "
                f"capacity only; kinds, libraries, dtypes, devices and rows of the buffers are "
                f"{_described(first)} in cache 0, and {_described(other)} in cache {i}"
            )
    capacities = [c for c in map(capacity_of, caches) if c is not None]
    if capacities:
        caches = [grow(cache, max(capacities)) for cache in caches]
    kinds, xp = kinds_of(first), namespace(first.length)
    store = {}
    for name, kind in kinds.items():
        joined = xp.concat([kind.in_memory_order(cache.store[name]) for cache in caches], axis=0)
        store[name] = kind.from_memory_order(joined)
    return holding(first, xp.concat([c.length for c in caches], axis=0), store)


def _described(cache: CacheLike) -> dict[str, tuple[object, ...]]:
    """What the buffers of caches to concatenate must have in common."""
    described: dict[str, tuple[object, ...]] = {}
    kinds = kinds_of(cache)
    for name, array in cache.store.items():
        rows = tuple(array.shape[2 if kinds[name].has_tokens else 1 :])
        place = library_of(array), dtype_name(array), str(exact_device(array))
        described[name] = (str(kinds[name]), *place, rows)
    return described
