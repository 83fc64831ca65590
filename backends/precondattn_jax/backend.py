"""The JAX backend: which leaves are computed by which algorithm.

A call of a leaf is one compiled function: outside `jax.jit` it is compiled once for its shapes;
inside, it is part of the surrounding computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.algebra.piece import Piece
from precondattn.algebra.recurrences import Recurrences, entry_of
from precondattn.arrays import Tree
from precondattn.backend import Request
from precondattn.frameworks.jax.backend import JaxBackend, JaxRunner, Output, StepOutput
from precondattn_portable.algorithm import AnyAlgorithm
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.backend import Portable


class Jax(JaxBackend, Portable):
    """Blocked algorithms in loops, on any device."""

    name = "jax"
    libraries = frozenset({"jax"})
    preference = 10
    segments_as_batch = False

    def arithmetic(self, library: str, device: str) -> Arithmetic:
        from precondattn_jax.arithmetic import JAX

        return JAX

    def algorithm_class(self, leaf: Piece | LeafProtocol) -> type[AnyAlgorithm] | None:
        return entry_of(self.algorithms, cast("LeafProtocol", leaf))

    @property
    def algorithms(self) -> Mapping[type | Recurrences, type[AnyAlgorithm]]:  # type: ignore[override]
        from precondattn_jax.algorithms import ALGORITHMS

        return ALGORITHMS

    def _computes(self, mechanism: Piece) -> bool:
        return len(mechanism.program.calls) == 1 and self.algorithm_class(mechanism) is not None

    def differentiable(self, mechanism: Piece) -> Output | None:
        if not self._computes(mechanism):
            return None
        algorithm: Any = self.algorithm(mechanism, "jax", "cpu")
        output: Output = algorithm.output
        return output

    def differentiable_step(self, mechanism: Piece) -> StepOutput | None:
        if not self._computes(mechanism):
            return None
        return self.runner(mechanism, "jax", "cpu").step

    def refusal(self, piece: Piece, request: Request) -> str | None:
        if len(piece.program.calls) > 1:
            return "runs the leaves of this group one by one"
        return super().refusal(piece, request)

    def run(self, verb: str, runner: JaxRunner, *arrays: Tree) -> Tree:
        from precondattn.frameworks.jax import sharding

        return sharding.compiled(verb, runner, *arrays)
