"""The lengths of caches on an accelerator that the host knows without waiting for the device.

A step is faster if its cache's length is a number. On an accelerator reading it takes as long as
all work that is still to be done there. So the host remembers the lengths that the library itself
wrote, if they are the same for all sequences: those of an empty cache and of one that it extended.
PyTorch counts the writes to a tensor; a length that was written to since is not known. Lengths that
were read are not remembered, because a CUDA graph may write to them without being counted.
"""

from __future__ import annotations

import weakref

from precondattn.arrays import Array, device_of, host_integers, is_traced, library_of

_known: dict[int, tuple[weakref.ref[Array], int, int]] = {}
"""The tensor, its count of writes and the length, by the identity of the tensor."""


def remembered(length: Array, tokens: int) -> Array:
    """The lengths (b,) of a cache, all of which are `tokens`."""
    if not _is_far(length) or length.is_inference():
        return length
    key = id(length)
    tensor = weakref.ref(length, lambda _: _known.pop(key, None))
    _known[key] = tensor, length._version, tokens
    return length


def lengths_on_host(length: Array) -> list[int] | None:
    """The lengths (b,) as a list; None if they are traced, or not on a CPU and not PyTorch's.

    If they are not known, the host waits for the device.
    """
    if not _is_far(length):
        return host_integers(length)
    known = None if length.is_inference() else _known.get(id(length))
    if known is not None:
        tensor, writes, tokens = known
        if id(tensor()) == id(length) and writes == length._version:
            return [tokens] * int(length.shape[0])
    integers: list[int] = length.tolist()
    return integers


def _is_far(length: Array) -> bool:
    """Whether reading the lengths waits for a device."""
    return library_of(length) == "torch" and device_of(length) != "cpu" and not is_traced(length)
