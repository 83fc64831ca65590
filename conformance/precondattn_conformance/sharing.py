"""The cases of each library at `smoke` if a run names no backend, library or mechanism.

    class as it is declared   every check on every library; of the design's rows each library has a
                              part, in turn
    its options, and          the outputs on every library; every other case, and every row, on one
    compositions              of the libraries, in turn
    JAX                       the outputs of classes as they are declared, since every call has to
                              be compiled

NumPy, PyTorch and CuPy run the same steps by the same algorithms, so most errors show on any of
them. A run that names a backend, a library or a mechanism has all cases of `smoke`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

import precondattn as pa
from precondattn.spec.mesa_query import MesaQuery
from precondattn_conformance.case import Case
from precondattn_conformance.checks import CHECK
from precondattn_conformance.declared import derived, mechanism_of
from precondattn_conformance.design.covering import Row
from precondattn_conformance.libraries import named

SHARING = ("numpy", "torch", "cupy")
"""Libraries that have the same checks on the same data, but for dtypes."""
WIDEST = "256"
"""The width of keys at which a d × d matrix for each token takes seconds."""


def is_plain(expression: str) -> bool:
    """Whether an expression is a class as it is declared, without options."""
    return expression.isidentifier() and expression not in derived()


@dataclass(frozen=True)
class Sharing:
    """The libraries of a run, which share its cases."""

    dtypes: Mapping[str, Sequence[str]]
    """The dtypes of each library."""

    def has_case(self, case: Case) -> bool:
        """Whether the run includes this case of named data."""
        if is_plain(case.mechanism) or case.library not in self.dtypes:
            return True
        if named(case.library).compiles_operations:
            return False
        if case.library not in SHARING or case.check == "outputs":
            return True
        able = [library for library in self._in_turn(case.dtype) if _applies(case, library)]
        key = (case.check, case.dtype, case.layout.name, case.kind, case.mechanism)
        return able[crc32("-".join(key).encode()) % len(able)] == case.library

    def has_row(self, number: int, row: Row, expression: str, library: str) -> bool:
        """Whether the run includes this row of a design on this library."""
        if library not in SHARING:
            return True
        if row.get("d") == WIDEST and _has_matrices(expression):
            return False
        able = self._in_turn(row["dtype"])
        return able[(number + crc32(expression.encode())) % len(able)] == library

    def _in_turn(self, dtype: str) -> list[str]:
        return [name for name in SHARING if dtype in self.dtypes.get(name, ())]


def _applies(case: Case, library: str) -> bool:
    of_library = Case(case.check, case.mechanism, library, case.dtype, case.layout, case.kind)
    return CHECK[case.check].applies(of_library)


def _has_matrices(expression: str) -> bool:
    """Whether the reference solves or multiplies with a d × d matrix for every token."""
    of_matrices = MesaQuery | pa.ConditionedQuery
    return any(isinstance(leaf, of_matrices) for leaf in mechanism_of(expression).program.leaves)
