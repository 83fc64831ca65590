"""Leaves without sums over tokens: their definition is already linear in memory."""

from __future__ import annotations

import precondattn as pa
from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.arrays import Array, Arrays, Residuals, Tree
from precondattn.cache import Updates
from precondattn_portable.algorithm import Algorithm

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
    """Calls the leaf's own methods."""

    name = "as defined"

    def forward(self, *arrays: Tree) -> tuple[Array, Residuals]:
        return self.leaf.forward(*arrays)

    def backward(self, *arrays: Tree) -> Arrays:
        return self.leaf.backward(*arrays)

    def step(self, *arrays: Tree) -> tuple[Array, Updates]:
        return self.leaf.step(*arrays)

    def step_backward(self, *arrays: Tree) -> tuple[Arrays, Arrays]:
        return self.leaf.step_backward(*arrays)
