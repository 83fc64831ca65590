"""Checks that the arguments which a pullback reads have not been overwritten.

PyTorch counts the writes to every tensor, so a write between a call and its pullback raises an
error. Writes to tensors of inference mode are not counted, so these tensors are copied. Other
libraries count no writes: the caller must not change the arguments.
"""

from __future__ import annotations

from collections.abc import Callable

from precondattn.algebra.call import Call
from precondattn.arrays import Array, Arrays, ByName, fresh, writes_in_place
from precondattn.cache import Cache
from precondattn.frameworks import of


def guarded(call: Call) -> tuple[Call, Callable[[], None]]:
    """The call, and a function that raises an error if an argument has changed since."""
    arguments = {**dict(zip(call.mechanism.inputs, call.arrays, strict=False)), **call.named}
    arguments |= call.masks
    if isinstance(call.cache, Cache):
        buffers = {"length": call.cache.length, **call.cache.store}
        arguments |= {f"the cache's {name!r}": buffer for name, buffer in buffers.items()}
    if any(of(array).is_of_inference(array) for array in arguments.values()):
        call = _with_copies(call)
    counts = {name: of(array).counted_writes(array) for name, array in arguments.items()}
    owner, cache, store = call.mechanism, call.cache, None
    if cache is not None and cache.store and writes_in_place(cache.length):
        store = cache.store  # A donated cache is emptied.

    def check() -> None:
        if store is not None and not store:
            raise ValueError(
                f"{owner}: the old cache was donated before the pullback has run, which reads it; "
                f"extend it without donate, or pull back first"
            )
        for name, array in arguments.items():
            if of(array).counted_writes(array) != counts[name]:
                raise RuntimeError(
                    f"{owner}: {name} was written to in place before the pullback has run, which "
                    f"reads it; write to a copy of it, or pull back first"
                )

    return call, check


def _with_copies(call: Call) -> Call:
    """The call, with copies of the tensors of inference mode."""

    def kept(array: Array) -> Array:
        return fresh(array) if of(array).is_of_inference(array) else array

    def all_kept(arrays: ByName) -> Arrays:
        return {name: kept(array) for name, array in arrays.items()}

    named, masks, cache = all_kept(call.named), all_kept(call.masks), call.cache
    if isinstance(cache, Cache):
        cache = cache._replace(length=kept(cache.length), store=all_kept(cache.store))
    arrays = tuple(map(kept, call.arrays))
    return call._replace(arrays=arrays, named=named, masks=masks, cache=cache)
