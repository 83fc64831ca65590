"""`pa.lucid(q, k, v)`: a mechanism with its options by keyword, built and called in one go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precondattn.arrays import Array
from precondattn.mechanism import Mechanism
from precondattn.options import fields_of
from precondattn.preconditioners import Laser, Lucid
from precondattn.spec.softmax import Softmax


def _shorthand(cls: type[Mechanism]) -> Callable[..., Array]:
    own = fields_of(cls)
    of_base = {} if cls is Softmax else {n: f for n, f in fields_of(Softmax).items() if n not in own}

    def call(*arrays: Array, **named: Any) -> Array:
        options = {name: named.pop(name) for name in own if _is_option(name, named)}
        if of_base:
            base = {name: named.pop(name) for name in of_base if _is_option(name, named)}
            options["base"] = Softmax(**base)
        return cls(**options)(*arrays, **named)

    around = "" if cls is Softmax else " around softmax"
    names = ", ".join([*own, *of_base])
    call.__name__ = call.__qualname__ = cls.name
    call.__doc__ = (
        f"`{cls.__name__}`{around}, called: inputs and masks as there, and as keywords the "
        f"options {names}."
    )
    return call


def _is_option(name: str, named: dict[str, Any]) -> bool:
    # `bias` is an option's name and an input's; as an array it is the input.
    return name in named and not hasattr(named[name], "shape")


softmax = _shorthand(Softmax)
lucid = _shorthand(Lucid)
laser = _shorthand(Laser)
