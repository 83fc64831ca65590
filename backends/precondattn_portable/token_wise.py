"""Leaves without sums over tokens: their definition is already linear in memory."""

from __future__ import annotations

import precondattn as pa
from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.arithmetic import Arithmetic

TOKEN_WISE = frozenset(
    {
        pa.ContractionGate,
        pa.Difference,
        pa.EluPlusOne,
        pa.HedgehogMap,
        pa.L2Norm,
        pa.LayerNorm,
        pa.RMSNorm,
        pa.ScaledDims,
        pa.StableBeta,
        pa.StableChannels,
        pa.Tempered,
        pa.UnitRows,
    }
)
"""Leaves whose definition is linear in memory, and can be traced and compiled: its control flow
does not depend on array entries."""


class AsDefined(Algorithm[LeafProtocol]):
    """The leaf's own methods."""

    name = "as defined"

    def __init__(self, ops: Arithmetic, leaf: LeafProtocol) -> None:
        super().__init__(ops, leaf)
        for method in ("forward", "backward", "step", "step_backward"):
            setattr(self, method, getattr(leaf, method))
