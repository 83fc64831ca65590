"""Faults of iterated solves: the iteration ends too early, or its result is not checked."""

from __future__ import annotations

from precondattn.arrays import Array
from precondattn_conformance.faults.fault import BACKWARD, FORWARD, Fault, Function
from precondattn_conformance.faults.written_by_hand.written import blocked
from precondattn_portable import block_conjugate_gradients, mesa_query, symmetric_lucid

BOTH = (FORWARD, BACKWARD)


def faults() -> list[Fault]:
    """All faults in this file."""
    early = [
        blocked(mechanism, BOTH, "two digits of the solution", module, "tolerance_of", _of_two)
        for mechanism, module in (
            ("symmetric_lucid_solve", symmetric_lucid),
            ("mesa_query", mesa_query),
        )
    ]
    return [
        *early,
        blocked(
            "symmetric_lucid_solve",
            BOTH,
            "the residual not examined",
            block_conjugate_gradients.Residual,
            "is_large",
            lambda _: lambda self: self.length < 0,
        ),
        blocked(
            "mesa_query",
            BOTH,
            "the residual not examined",
            mesa_query,
            "Residual",
            lambda _: _NeverLarge,
        ),
    ]


def _of_two(true: Function) -> Function:
    return lambda leaf, x: 1e-2


class _NeverLarge(block_conjugate_gradients.Residual):
    def is_large(self) -> Array:
        return self.length < 0
