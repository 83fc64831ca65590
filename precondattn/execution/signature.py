"""The signature of a call: everything on which its checks and its plan depend.

That is the mechanism and the verb, the names of the arguments, what each array is (library, dtype,
shape, device, whether it requires a gradient), the backends allowed, and the state of the library:
PyTorch's grad mode and autocast. It is never the entries of arrays. Calls of one signature pass the
same checks and have the same plan, so these are made once (`preparation.py`).

A call has no signature where more than this matters: arrays that are traced, transformed by
torch.func, distributed or of a subclass, and PyTorch's modes (as for counting FLOPs). Such a call
is checked and planned every time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from precondattn.arrays import Array, exact_device, library_of, only_computes
from precondattn.cache import Cache
from precondattn.dispatch.discovery import selection

if TYPE_CHECKING:
    from precondattn.algebra.piece import BackendNames, Piece
    from precondattn.given import Given


class GivenCall(NamedTuple):
    """A call as it is given, nothing of which is checked yet."""

    verb: str
    mechanism: Piece
    arrays: tuple[Array, ...]
    """The arguments by position; `named` are the inputs by name, `masks` the masks."""
    named: Mapping[str, Given]
    masks: Mapping[str, Given]
    """None for a mask that is not given."""
    backend: BackendNames
    cache: Given = None
    """For extensions."""


class ArgumentKind(NamedTuple):
    """What can be read of the arguments of one type."""

    describe: Callable[[Given], Hashable]
    state: Callable[[Given], Hashable | None] = lambda array: True
    """The state of the library for calls with this array; None where there is no signature."""


def signature_of(call: GivenCall) -> Hashable | None:
    """The signature, or None for a call without one."""
    verb, mechanism, arrays, named, masks, backend, cache = call
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
        kind = _kinds.get(type(argument)) or _learned(argument)
        if kind is None:
            return None
        if state is None:  # That of the first argument; a call has arrays of one library.
            state = kind.state(argument)
            if state is None:
                return None
        try:
            described.append(kind.describe(argument))
        except RuntimeError:  # A nested tensor has no shape. It is refused by every call.
            described.append("no shape")
    # The name of a mechanism never changes its meaning, and its hash is that of a text.
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


_of_torch = attrgetter("dtype", "shape", "device", "requires_grad", "layout")
_of_numpy = attrgetter("dtype", "shape")
_of_jax = attrgetter("dtype", "shape", "sharding")


def _of_any(array: Array) -> Hashable:
    return type(array), array.dtype, tuple(array.shape), str(exact_device(array))


def _of_sequence(numbers: Sequence[int]) -> Hashable:
    """Lengths on the host, which are checked in every call."""
    return "numbers"


_kinds: dict[type, ArgumentKind | None] = {
    list: ArgumentKind(_of_sequence),
    tuple: ArgumentKind(_of_sequence),
}


def _learned(argument: Given) -> ArgumentKind | None:
    """The kind of a type that is seen for the first time; None for calls without a signature."""
    cls = type(argument)
    if cls not in _kinds:
        _kinds[cls] = _kind_of(argument)
    return _kinds[cls]


def _kind_of(argument: Given) -> ArgumentKind | None:
    library, cls = library_of(argument), type(argument)
    if library == "torch":
        torch = sys.modules["torch"]
        is_plain = cls in (torch.Tensor, torch.nn.Parameter)
        return ArgumentKind(_of_torch, _state_of_torch) if is_plain else None
    if library == "jax":
        return ArgumentKind(_of_jax) if cls.__name__ == "ArrayImpl" else None
    if library == "numpy":
        return ArgumentKind(_of_numpy)
    return None if library is None else ArgumentKind(_of_any)
