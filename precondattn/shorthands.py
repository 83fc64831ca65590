"""`pa.lucid(q, k, v)`: a mechanism with its options by keyword, built and called in one go."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from precondattn.arrays import Array, is_compiling
from precondattn.options import fields_of
from precondattn.preconditioners import Laser, Lucid
from precondattn.spec.softmax import Softmax
from precondattn.verbs import CALL_OPTIONS

SWITCHES = {"bias": "bias", "lucid_beta": "beta"}
"""Inputs that are there when an option says so; giving the array says so too."""


BUILDERS: dict[str, Callable[..., Array]] = {}
"""What the shorthands do, by the name of their mechanism."""


def _shorthand(cls: Any) -> Callable[..., Array]:
    own = [*fields_of(cls)]
    of_base = [] if cls is Softmax else [name for name in fields_of(Softmax) if name not in own]

    def call(*arrays: Array, **named: Any) -> Array:
        if is_compiling():
            from precondattn.bridges.torch_compile import captured_shorthand

            tensors = {name: value for name, value in named.items() if hasattr(value, "shape")}
            constants = {name: value for name, value in named.items() if name not in tensors}
            return captured_shorthand(
                cls.name,
                arrays,
                tuple(tensors),
                tuple(tensors.values()),
                tuple(constants),
                tuple(constants.values()),
            )
        return build_and_call(*arrays, **named)

    def build_and_call(*arrays: Array, **named: Any) -> Array:
        options: dict[str, Any] = {}
        given = set(named)
        for name in [*named]:
            is_array = hasattr(named[name], "shape") and getattr(named[name], "ndim", 0) > 0
            if is_array and SWITCHES.get(name) in (*own, *of_base):
                if SWITCHES[name] not in given or SWITCHES[name] == name:
                    options[SWITCHES[name]] = True
            elif name in own or name in of_base:
                options[name] = named.pop(name)
        base = {name: options.pop(name) for name in of_base if name in options}
        mechanism = cls(**options, base=Softmax(**base)) if base else cls(**options)
        known = [*own, *of_base, *mechanism.inputs, *CALL_OPTIONS]
        for name in named:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise TypeError(
                    f"{cls.name}: unknown keyword {name!r}{hint}; options are "
                    f"{', '.join([*own, *of_base])}, inputs {', '.join(mechanism.inputs)}, and "
                    f"{', '.join(CALL_OPTIONS)}"
                )
        return mechanism(*arrays, **named)

    around = "" if cls is Softmax else " around softmax"
    BUILDERS[cls.name] = build_and_call
    call.__name__ = call.__qualname__ = cls.name
    call.__doc__ = (
        f"`{cls.__name__}`{around}, called: inputs and masks as there, and as keywords the "
        f"options {', '.join([*own, *of_base])}. An optional input switches its option on."
    )
    return call


softmax = _shorthand(Softmax)
lucid = _shorthand(Lucid)
laser = _shorthand(Laser)
