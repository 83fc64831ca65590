"""A layer of Transformers whose recurrence is computed by other functions.

A layer calls its recurrence by name, as a function of its module. So it gets a class of its own, a
subclass with the same methods in which these names have other values. The weights and the
`state_dict` stay as they are, and other layers of its first class too.

The names that these methods read do not say of which module they are: `torch.compile` would take
the values from that module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import CodeType, FunctionType
from typing import Any, cast

from torch import nn

from precondattn.algebra.piece import BackendNames
from precondattn.integrations.transformers.interface import force_accelerate_hooks

LayerClass = Any
"""A class of layers."""
Forward = Callable[..., Any]
"""A method of a layer, or a function that it calls."""
Functions = dict[str, Forward]
"""Functions by the names with which a layer calls them."""
Maker = Callable[[BackendNames], Functions]
"""A function from a backend to the functions that a layer calls."""
METHODS = ("forward", "step")
"""The methods of a layer that call functions."""
Around = Callable[[Forward], Forward]
"""A function that wraps the forward method of a layer."""


def compute_by(
    layer: nn.Module, maker: Maker, backend: BackendNames, around: Around | None = None
) -> None:
    """Make a layer call the functions of `maker(backend)` in place of those with the same names.

    `maker` and `around` must be module-level functions, because a saved layer stores their names.
    """
    _set_class(layer, _computed(class_of(layer), maker, backend, around))


def restore(layer: nn.Module) -> None:
    """Restore the class of a layer in Transformers."""
    _set_class(layer, class_of(layer))


def class_of(layer: nn.Module) -> LayerClass:
    """The class of a layer in Transformers."""
    return getattr(type(layer), "_class_in_transformers", type(layer))


def code_of(cls: LayerClass, method: str) -> CodeType:
    """The code of a method; that of an empty function if there is none."""
    return getattr(inspect.unwrap(getattr(cls, method, _nothing)), "__code__", _nothing.__code__)


def _nothing() -> None: ...


@cache
def _computed(
    base: LayerClass, maker: Maker, backend: BackendNames, around: Around | None
) -> LayerClass:
    """The subclass, one for all layers with the same functions, so that it is compiled once."""
    values = maker(backend)
    methods = {
        name: _calling(getattr(base, name), values)
        for name in METHODS
        if values.keys() & set(code_of(base, name).co_names)
    }
    if around is not None:
        methods["forward"] = around(methods["forward"])

    def reduced(self: nn.Module, protocol: object) -> tuple[object, ...]:
        """The rule for pickling and copying a layer, whose class is not in a module."""
        parts = cast("tuple[object, ...]", object.__reduce_ex__(self, 2))
        return (_empty, (base, maker, backend, around), *parts[2:])

    members = {
        **methods,
        "__reduce_ex__": reduced,
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "_class_in_transformers": base,
    }
    return type(base.__name__, (base,), members)


def _calling(decorated: Forward, values: Functions) -> Forward:
    """A method in which the names in `values` have these values."""
    own: Forward = inspect.unwrap(decorated)
    names = {name: value for name, value in own.__globals__.items() if name != "__name__"}
    method: Forward = FunctionType(
        own.__code__, {**names, **values}, own.__name__, own.__defaults__, own.__closure__
    )
    method.__kwdefaults__, method.__module__ = own.__kwdefaults__, own.__module__
    return method if own is decorated else force_accelerate_hooks("conv1d")(method)


def _empty(
    base: LayerClass, maker: Maker, backend: BackendNames, around: Around | None
) -> nn.Module:
    """A layer before its state is set."""
    cls = _computed(base, maker, backend, around)
    return cls.__new__(cls)


def _set_class(layer: nn.Module, cls: LayerClass) -> None:
    """Change the class of a layer, inside accelerate's hooks if it has any."""
    layer.__class__ = cls
    if hasattr(layer, "_old_forward"):
        layer._old_forward = cls.forward.__get__(layer)
    else:
        vars(layer).pop("forward", None)
