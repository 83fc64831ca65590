"""`pa.lucid(q, k, v)`: a mechanism with its options by keyword, built and called in one go."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from precondattn.arrays import Array, is_compiling
from precondattn.options import fields_of
from precondattn.preconditioners import (
    CCQ,
    Differential,
    Elu1,
    Hedgehog,
    Laser,
    Lucid,
    PerDimScale,
    QKNorm,
    RowNormalized,
    Temperature,
)
from precondattn.spec.contraction_gate import ContractionGate
from precondattn.spec.delta import Delta, GatedDelta
from precondattn.spec.gla import GLA
from precondattn.spec.gsa import GSA
from precondattn.spec.linear import Linear
from precondattn.spec.path import Path
from precondattn.spec.retention import Retention
from precondattn.spec.softmax import Softmax
from precondattn.spec.ssd import SSD
from precondattn.verbs import CALL_OPTIONS

SWITCHES: dict[str, tuple[str, Callable[[Array], Any]]] = {
    "bias": ("bias", lambda array: True),
    "lucid_beta": ("beta", lambda array: True),
    "q_gain": ("gain", lambda array: True),
    "k_gain": ("gain", lambda array: True),
    "lam": ("per", lambda array: {1: "head", 3: "token"}.get(array.ndim, "layer")),
    "tau": ("per", lambda array: "head" if array.ndim == 1 else "layer"),
}
"""Inputs whose presence, or number of axes, an option tells; giving the array tells it too."""


BUILDERS: dict[str, Callable[..., Array]] = {}
"""What the shorthands do, by the name of their mechanism."""


def _shorthand(cls: Any) -> Callable[..., Array]:
    own = [*fields_of(cls)]
    has_base = "base" in cls.__dataclass_fields__
    of_base = [name for name in fields_of(Softmax) if name not in own] if has_base else []

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
        return mechanism(*arrays, **named)

    around = " around softmax" if has_base else ""
    BUILDERS[cls.name] = build_and_call
    call.__name__ = call.__qualname__ = cls.name
    call.__doc__ = (
        f"`{cls.__name__}`{around}, called: inputs and masks as there, and as keywords the "
        f"options {', '.join([*own, *of_base])}. An optional input switches its option on."
    )
    return call


softmax = _shorthand(Softmax)
path = _shorthand(Path)
linear = _shorthand(Linear)
retention = _shorthand(Retention)
ssd = _shorthand(SSD)
gla = _shorthand(GLA)
delta = _shorthand(Delta)
gated_delta = _shorthand(GatedDelta)
gsa = _shorthand(GSA)
lucid = _shorthand(Lucid)
laser = _shorthand(Laser)
ccq = _shorthand(CCQ)
contraction_gate = _shorthand(ContractionGate)
temperature = _shorthand(Temperature)
per_dim_scale = _shorthand(PerDimScale)
qk_norm = _shorthand(QKNorm)
differential = _shorthand(Differential)
row_normalized = _shorthand(RowNormalized)
elu1 = _shorthand(Elu1)
hedgehog = _shorthand(Hedgehog)
