"""From a shorthand's keywords to a mechanism and its call: options and inputs are told apart."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from precondattn.algebra.options import fields_of
from precondattn.arrays import Array
from precondattn.execution.arguments import CALL_OPTIONS
from precondattn.spec.softmax import Softmax

SWITCHES: dict[str, tuple[str, Callable[[Array], Any]]] = {
    "bias": ("bias", lambda array: True),
    "lucid_beta": ("beta", lambda array: True),
    "q_gain": ("gain", lambda array: True),
    "k_gain": ("gain", lambda array: True),
    "lam": ("per", lambda array: {1: "head", 3: "token"}.get(array.ndim, "layer")),
    "tau": ("per", lambda array: "head" if array.ndim == 1 else "layer"),
}
"""Optional inputs: the option that declares each, and its value for an array that is given."""

BUILDERS: dict[str, Callable[..., Array]] = {}
"""What each shorthand does, by the name of its mechanism."""


def options_of(cls: Any) -> tuple[list[str], list[str]]:
    """The mechanism's own options, and those of the softmax that it is built around."""
    own = [*fields_of(cls)]
    has_base = "base" in cls.__dataclass_fields__
    return own, [name for name in fields_of(Softmax) if name not in own] if has_base else []


def builder(cls: Any) -> Callable[..., Array]:
    """A function that builds the mechanism from its keywords and calls it."""
    own, of_base = options_of(cls)

    def build_and_call(*arrays: Array, **named: Any) -> Array:
        options: dict[str, Any] = {}
        given = set(named)
        for name in [*named]:
            option, value = SWITCHES.get(name, (None, None))
            is_array = hasattr(named[name], "shape")
            if name == option and is_array and named[name].ndim == 0:
                is_array = False  # NumPy's True.
            if is_array and option in (*own, *of_base):
                if value is not None and (option not in given or option == name):
                    options[option] = value(named[name])
            elif name in own or name in of_base:
                options[name] = named.pop(name)
        base = {name: options.pop(name) for name in of_base if name in options}
        mechanism = cls(**options, base=Softmax(**base)) if base else cls(**options)
        known = [*own, *of_base, *mechanism.inputs, *CALL_OPTIONS]
        for name in named:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                if name == "g" and "forget" in known:
                    hint = " (it belongs to forget='unscaled' or forget='scaled')"
                raise TypeError(
                    f"{cls.name}: unknown keyword {name!r}{hint}; options are "
                    f"{', '.join([*own, *of_base])}, inputs {', '.join(mechanism.inputs)}, and "
                    f"{', '.join(CALL_OPTIONS)}"
                )
        out: Array = mechanism(*arrays, **named)
        return out

    BUILDERS[cls.name] = build_and_call
    return build_and_call
