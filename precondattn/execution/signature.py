"""The signature of a call: everything that its checks and its plan depend on.

It consists of the mechanism and the verb, the names of the arguments, the properties of each array
(library, dtype, shape, device, whether it requires a gradient), the allowed backends, and PyTorch's
grad mode and autocast. It never depends on the entries of arrays. Calls of one signature share
their checks and their plan (`preparation.py`).

A call has no signature if more than this matters: if arrays are traced, transformed by torch.func,
distributed or of a subclass, or in a mode of PyTorch (for example one that counts FLOPs). Such a
call is checked and planned every time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from operator import attrgetter

from precondattn.algebra.call import Call
from precondattn.arrays import Array, exact_device, library_of, only_computes
from precondattn.cache import Cache
from precondattn.dispatch.discovery import selection
from precondattn.given import Given


def signature_of(call: Call) -> Hashable | None:
    """The signature of a call; None for a call that has none."""
    verb, mechanism, arrays, named, masks, backend, cache, _, _ = call
    arguments = (*arrays, *named.values(), *masks.values())
    names: object = (*named,)
    if cache is not None:
        if type(cache) is not Cache or type(cache.store) is not dict:
            return None
        arguments = (*arguments, cache.length, *cache.store.values())
        names = (names, *cache.store)
    described: list[Hashable] = []
    state: Hashable | None = None
    for argument in arguments:
        if argument is None:  # A mask that is not given.
            described.append(None)
            continue
        cls = type(argument)
        describe = _described_by[cls] if cls in _described_by else _learned(argument)
        if describe is None:
            return None
        if state is None:  # One library: the first argument determines it.
            state = _state_of_torch(argument) if describe is _of_torch else True
            if state is None:
                return None
        try:
            described.append(describe(argument))
        except RuntimeError:  # A nested tensor has no shape; every call refuses it.
            described.append("no shape")
    # The name always means the same mechanism, and a text is fast to hash.
    chosen = selection(backend)
    return verb, mechanism._name, names, len(arrays), chosen, state, tuple(described)


def _state_of_torch(tensor: Array) -> Hashable | None:
    if not only_computes():
        return None
    torch, device = sys.modules["torch"], tensor.device.type
    try:
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    except RuntimeError:  # A device without autocast.
        autocast = False
    return torch.is_grad_enabled(), autocast


Describe = Callable[[Given], Hashable]

_of_torch: Describe = attrgetter("dtype", "shape", "device", "requires_grad", "layout")


def _of_any(array: Array) -> Hashable:
    return type(array), array.dtype, tuple(array.shape), str(exact_device(array))


# Lists and tuples are lengths or the like, which every call checks.
_described_by: dict[type, Describe | None] = dict.fromkeys((list, tuple), lambda _: "numbers")
"""The function that describes arguments of a type; None if calls with them have no signature."""


def _learned(argument: Given) -> Describe | None:
    """The function that describes arguments of a type, when it is seen for the first time."""
    library, cls = library_of(argument), type(argument)
    describe: Describe | None = None if library is None else _of_any
    if library == "torch":
        torch = sys.modules["torch"]
        describe = _of_torch if cls in (torch.Tensor, torch.nn.Parameter) else None
    elif library == "jax":
        is_plain = cls.__name__ == "ArrayImpl"
        describe = attrgetter("dtype", "shape", "sharding") if is_plain else None
    elif library == "numpy":
        describe = attrgetter("dtype", "shape")
    _described_by[cls] = describe
    return describe
