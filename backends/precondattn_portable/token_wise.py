"""Leaves without sums over tokens: their definition is already linear in memory."""

from __future__ import annotations

from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.arrays import Array, Arrays, Residuals, Tree
from precondattn.cache import Updates
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.arithmetic import Arithmetic


class AsDefined(Algorithm[LeafProtocol]):
    """Calls the leaf's own methods."""

    name = "as defined"

    def forward(
        self, ops: Arithmetic, leaf: LeafProtocol, *arrays: Tree
    ) -> tuple[Array, Residuals]:
        return leaf.forward(*arrays)

    def backward(self, ops: Arithmetic, leaf: LeafProtocol, *arrays: Tree) -> Arrays:
        return leaf.backward(*arrays)

    def step(self, ops: Arithmetic, leaf: LeafProtocol, *arrays: Tree) -> tuple[Array, Updates]:
        return leaf.step(*arrays)

    def step_backward(
        self, ops: Arithmetic, leaf: LeafProtocol, *arrays: Tree
    ) -> tuple[Arrays, Arrays]:
        return leaf.step_backward(*arrays)
