"""Cropping a cache: removing the last tokens of its sequences.

Only a history of tokens can be cropped. The rows of removed tokens are set to 0, as in a cache that
never had them, so that a NaN in one of them has no effect.
"""

from __future__ import annotations

from precondattn.arrays import (
    Array,
    arange_like,
    cast,
    dtype_name,
    fresh,
    is_traced,
    namespace,
    wants_gradient,
    writes_in_place,
    zero_where_not,
)
from precondattn.cache.conversion import ordinary, with_writable_buffers
from precondattn.cache.integers import Integers, entries, integers
from precondattn.cache.kept import FROM, checkpoints, is_kept, states_at, without_kept
from precondattn.cache.kinds import (
    KEPT,
    TOKENS,
    WINDOW,
    C,
    CacheLike,
    Kind,
    capacity_of,
    holding,
    invalid_length,
    kinds_of,
    refuse_distributed,
)
from precondattn.cache.windows import FIRST, reach_of
from precondattn.given import Given, whole_number


def fixed_buffers(cache: CacheLike) -> list[str]:
    """The names of the buffers that can not be cropped to any length."""
    return [n for n, kind in kinds_of(cache).items() if kind.rows not in (TOKENS, WINDOW, KEPT)]


def crop(cache: C, lengths: Given, *, donate: bool) -> C:
    fixed = fixed_buffers(cache)
    if fixed and FROM not in cache.store:
        raise ValueError(
            f"crop: {', '.join(map(repr, fixed))} can not be cropped, because states and rewritten "
            f"rows depend on all tokens; take a snapshot() before the tokens, and restore() it, or "
            f"keep earlier states by extend(..., keep=n) or extend(..., states_every=n)"
        )
    b = cache.length.shape[0]
    if not isinstance(lengths, (list, tuple)) and not getattr(lengths, "shape", ()):
        number = whole_number(lengths)
        if number is None:
            raise TypeError(
                f"crop: lengths must be a whole number, or one for each sequence; found {lengths!r}"
            )
        lengths = [number] * b
    return cropped(cache, integers("crop: lengths", lengths, cache.length, b), "crop", donate)


def cropped(cache: C, new: Integers, verb: str, donate: bool) -> C:
    """The cache cropped to lengths (b,): histories are cropped, and other buffers unchanged."""
    xp, given, cache = namespace(cache.length), cache, ordinary(cache)
    kinds = kinds_of(cache)
    refuse_distributed(cache, verb)
    if donate and wants_gradient(*cache.store.values()) and writes_in_place(cache.length):
        raise ValueError(
            f"{verb}: donate=True writes in place, so it can not be differentiated; call it under "
            f"torch.no_grad(), or without donate"
        )
    cache = with_writable_buffers(cache) if donate else cache
    capacity = capacity_of(cache)
    invalid = invalid_length(capacity)
    first, reach = cache.store.get(FIRST), reach_of(cache) or 0
    has_kept = FROM in cache.store
    removed, length, row = None, new.array, new.array
    if is_traced(cache.length) or new.known is None:
        valid = (new.array >= 0) & (new.array <= cache.length)
        if capacity is not None:
            valid = valid & (cache.length <= capacity)
        if first is not None:
            valid = valid & ((first == 0) | (new.array >= first + reach))
            row = new.array - first
        if has_kept:
            valid = valid & is_kept(cache, new.array)
        length = cast(xp.where(valid, new.array, invalid), cache.length.dtype)
    else:
        held = entries(cache.length)
        starts = [0] * len(held) if first is None else entries(first)
        kept = checkpoints(cache) if has_kept else [[]] * len(held)
        each = zip(new.known, held, starts, kept, strict=True)
        for i, (after, before, start, at) in enumerate(each):
            if before == invalid:
                raise ValueError(
                    f"{verb}: sequence {i} of the batch has lost tokens and is invalid"
                )
            if not 0 <= after <= before:
                raise ValueError(
                    f"{verb}: lengths must lie between 0 and the {before} tokens held; found "
                    f"{after} (sequence {i} of the batch)"
                )
            if start and after < start + reach:
                raise ValueError(
                    f"{verb}: lengths must be {start + reach} or above, because the cache holds a "
                    f"window of the last tokens only; found {after} (sequence {i} of the batch); "
                    f"take a snapshot() before the tokens, and restore() it"
                )
            if has_kept and after != before and after not in at:
                shown = [*at[:2], "...", *at[-2:]] if len(at) > 4 else at
                raise ValueError(
                    f"{verb}: the cache holds the states of {', '.join(map(str, [*shown, before]))}"
                    f" tokens; found {after} (sequence {i} of the batch)"
                )
        removed = [
            (after - start, before - start)
            for after, before, start in zip(new.known, held, starts, strict=True)
        ]
    buffers = dict(cache.store)
    # `restore`, or kept states, replace the states in it.
    store = buffers | (states_at(cache, new.array) if has_kept else {})
    if donate:  # Before the first write: the cache is refused if one fails.
        given.store.clear()
        cache.store.clear()
    for name, buffer in buffers.items():
        if kinds[name].rows == TOKENS:
            store[name] = _without_rows(buffer, kinds[name], row, removed, donate)
        elif kinds[name].rows == WINDOW and not donate:
            store[name] = fresh(buffer)
    return without_kept(holding(cache, length, store))


def _without_rows(
    buffer: Array,
    kind: Kind,
    length: Array,
    removed: list[tuple[int, int]] | None,
    donate: bool,
) -> Array:
    """A history with 0 from row `length` (b,) on; `removed` has each sequence's range of rows."""
    if removed is not None and writes_in_place(buffer):
        target = buffer if donate else fresh(buffer)
        if len(set(removed)) == 1:
            target[:, slice(*removed[0])] = 0
        else:
            for i, rows in enumerate(removed):
                target[i, slice(*rows)] = 0
        return target
    xp = namespace(buffer)
    is_kept = arange_like(buffer.shape[1], length)[None, :] < length[:, None]
    is_kept = xp.reshape(is_kept, (*is_kept.shape, *(1,) * (buffer.ndim - 2)))
    if dtype_name(buffer) == "bool":
        return buffer & is_kept
    kept = zero_where_not(kind.in_memory_order(is_kept), kind.in_memory_order(buffer))
    return kind.from_memory_order(kept)
