"""The lengths of caches on an accelerator that the host knows without waiting for the device.

Reading a length takes as long as all work that is still to be done on the device. So the host
remembers the lengths that the library itself wrote, if they are the same for all sequences. PyTorch
counts the writes to a tensor; a length that was written to since is not known. Lengths that were
read are not remembered, because a CUDA graph may write to them without being counted.
"""

from __future__ import annotations

import weakref

from precondattn.arrays import Array
from precondattn.frameworks import of

_remembered: dict[int, tuple[weakref.ref[Array], int, int]] = {}
"""The tensor, its count of writes and the length, by the identity of the tensor."""


def remembered(length: Array, tokens: int) -> Array:
    """The lengths (b,) of a cache, all of which are `tokens`."""
    if not of(length).is_far(length) or length.is_inference():
        return length
    key = id(length)
    tensor = weakref.ref(length, lambda _: _remembered.pop(key, None))
    _remembered[key] = tensor, length._version, tokens
    return length


def lengths_on_host(length: Array) -> list[int] | None:
    """The lengths (b,) as a list; None if they are traced, or not on a CPU and not PyTorch's."""
    framework = of(length)
    if not framework.is_far(length):
        return framework.host_integers(length)
    remembered_length = None if length.is_inference() else _remembered.get(id(length))
    if remembered_length is not None:
        tensor, writes, tokens = remembered_length
        if id(tensor()) == id(length) and writes == length._version:
            return [tokens] * int(length.shape[0])
    integers: list[int] = length.tolist()
    return integers
