"""Checks of caches: whether a mechanism can have one, and whether a given one fits a call."""

from __future__ import annotations

from precondattn.algebra.declaration import ShapeError, Sizes
from precondattn.algebra.piece import Piece
from precondattn.arrays import HALF, ByName, dtype_name, library_of
from precondattn.cache import KEY_MASK, Cache
from precondattn.cache.windows import FIRST
from precondattn.execution.array_checks import check_device
from precondattn.execution.masks import INTEGERS


def keeps_tokens(mechanism: Piece) -> bool:
    """Whether the mechanism's cache has a row for each token, and not only states."""
    return any(pattern.keeps_tokens for _, pattern in mechanism.program.slots.values())


def check_has_states(mechanism: Piece) -> None:
    check_cacheable(mechanism)
    if keeps_tokens(mechanism):
        raise TypeError(
            f"{mechanism}: extend_vjp needs a cache of states, and this cache stores tokens; use "
            f"vjp of a full call, or the automatic differentiation of PyTorch or JAX"
        )


def check_cacheable(mechanism: Piece) -> None:
    if not mechanism.offers.causal:
        raise ValueError(
            f"{mechanism}: is not causal, so it can not have a cache: a token that is appended "
            f"would change the outputs of the tokens before it"
        )


def check_is_cache(owner: str, cache: object) -> None:
    """Raise an error for a first argument of `extend` that is not a cache."""
    if not isinstance(cache, Cache):
        raise TypeError(
            f"{owner}: the first argument of extend must be a Cache from init_cache; "
            f"found {type(cache).__name__}"
        )


def check_cache(owner: str, mechanism: Piece, cache: Cache, inputs: ByName) -> int:
    """The capacity of a cache that fits a call; 0 for a mechanism that caches no tokens."""
    slots = mechanism.program.slots
    keys = set(slots)
    if keys and not cache.store:
        raise ValueError(
            f"{owner}: this cache was donated by extend(..., donate=True) and can not be used again"
        )
    if not keys <= set(cache.store) <= keys | {KEY_MASK, FIRST}:
        raise ValueError(
            f"{owner}: the cache is of another mechanism: it has the buffers "
            f"{sorted(cache.store)}, and {sorted(keys)} are needed"
        )
    like = next(iter(inputs.values()))
    for name, array in {"length": cache.length, **cache.store}.items():
        if library_of(array) != library_of(like):
            raise TypeError(
                f"{owner}: the cache's {name!r} is an array of {library_of(array)}; the inputs are "
                f"of {library_of(like)}"
            )
        check_device(f"{owner}: the cache's {name!r}", array, like)
    if cache.length.ndim != 1 or dtype_name(cache.length) not in INTEGERS:
        raise TypeError(
            f"{owner}: the cache's 'length' must be integers of shape (b); found "
            f"{dtype_name(cache.length)} of shape {tuple(cache.length.shape)}"
        )
    for name, (_, pattern) in slots.items():
        buffer = cache.store[name]
        if "c" in pattern.letters and buffer.ndim == len(pattern.letters):
            return buffer.shape[pattern.letters.index("c")]  # type: ignore[no-any-return]
    return cache.store[KEY_MASK].shape[1] if KEY_MASK in cache.store else 0


def check_buffers(
    owner: str, mechanism: Piece, cache: Cache, sizes: Sizes, dtype: str, hint: str = ""
) -> None:
    """Raise an error unless the buffers fit; `hint` is appended to the error of a wrong dtype."""
    if KEY_MASK in cache.store:
        mask, expected = cache.store[KEY_MASK], (sizes["b"], sizes["c"])
        if tuple(mask.shape) != expected or dtype_name(mask) != "bool":
            raise TypeError(
                f"{owner}: the cache's {KEY_MASK!r} must be bool of shape {expected}; found "
                f"{dtype_name(mask)} of shape {tuple(mask.shape)}"
            )
    for name, (slot, pattern) in mechanism.program.slots.items():
        shape, buffer = pattern.shape(sizes), cache.store[name]
        if tuple(buffer.shape) != shape:
            raise ShapeError(
                f"{owner}: the cache's {name!r} has shape {tuple(buffer.shape)}; "
                f"these inputs need {shape}"
            )
        needed = "float32" if slot.wide and dtype in HALF else dtype
        if dtype_name(buffer) != needed:
            raise TypeError(
                f"{owner}: the cache's {name!r} has dtype {dtype_name(buffer)}; "
                f"these inputs need {needed}{hint}"
            )
