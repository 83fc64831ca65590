"""The arguments that a pullback reads later. It holds them by reference, without a copy.

PyTorch counts the writes to every tensor, for its own autograd: here too, a write between the call
and its pullback is an error. The writes to tensors of inference mode are not counted, so these are
copied. Other libraries count no writes: there the caller has to leave the arguments as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from precondattn.arrays import Array, Arrays, copied, library_of, writes_in_place
from precondattn.cache import Cache
from precondattn.execution.signature import GivenCall


def countable(call: GivenCall) -> GivenCall:
    """The call, with copies of the tensors whose writes PyTorch does not count."""
    if not any(_is_uncounted(array) for array in _arguments(call).values()):
        return call
    cache = call.cache
    if isinstance(cache, Cache):
        cache = cache._replace(length=_kept(cache.length), store=_all_kept(cache.store))
    return call._replace(
        arrays=tuple(map(_kept, call.arrays)),
        named=_all_kept(call.named),
        masks=_all_kept(call.masks),
        cache=cache,
    )


def _is_uncounted(array: Array) -> bool:
    return library_of(array) == "torch" and bool(array.is_inference())


def _kept(array: Array) -> Array:
    return copied(array) if _is_uncounted(array) else array


def _all_kept(arrays: Mapping[str, Array]) -> Arrays:
    return {name: _kept(array) for name, array in arrays.items()}


def _arguments(call: GivenCall) -> Arrays:
    """The arguments, by what a message calls them."""
    arguments = {**dict(zip(call.mechanism.inputs, call.arrays, strict=False)), **call.named}
    arguments |= call.masks
    if isinstance(call.cache, Cache):
        buffers = {"length": call.cache.length, **call.cache.store}
        arguments |= {f"the cache's {name!r}": buffer for name, buffer in buffers.items()}
    return arguments


def check_unchanged(call: GivenCall) -> Callable[[], None]:
    """A check that raises an error where a pullback would read something else than the call did."""
    owner, cache = call.mechanism, call.cache
    writes = [
        (name, tensor, tensor._version)
        for name, tensor in _arguments(call).items()
        if library_of(tensor) == "torch" and not tensor.is_inference()
    ]
    store = None
    if cache is not None and cache.store and writes_in_place(cache.length):
        store = cache.store  # It is emptied where it is donated.

    def check() -> None:
        if store is not None and not store:
            raise ValueError(
                f"{owner}: the old cache was donated before the pullback has run, which reads it; "
                f"extend it without donate, or pull back first"
            )
        for name, tensor, before in writes:
            if tensor._version != before:
                raise RuntimeError(
                    f"{owner}: {name} was written to in place before the pullback has run, which "
                    f"reads it; write to a copy of it, or pull back first"
                )

    return check
