"""`pa.lucid(q, k, v)`: a mechanism with its options by keyword, built and called in one go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precondattn.arrays import Array, is_compiling
from precondattn.execution.build import builder, options_of
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


def _shorthand(cls: Any) -> Callable[..., Array]:
    own, of_base = options_of(cls)
    build_and_call = builder(cls)

    def call(*arrays: Array, **named: Any) -> Array:
        if is_compiling():
            from precondattn.execution.torch_compile import captured_shorthand

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

    around = " around softmax" if "base" in cls.__dataclass_fields__ else ""
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
