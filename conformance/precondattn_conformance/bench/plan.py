"""The row of a case before it is measured: its description, and the backends that would run."""

from __future__ import annotations

import numpy as np

from precondattn.backend import UnsupportedError
from precondattn_conformance.bench import machine
from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.computation import allowed
from precondattn_conformance.bench.correct import LARGEST
from precondattn_conformance.bench.cost import keeps_tokens
from precondattn_conformance.bench.record import Row


def empty_row(case: BenchCase) -> Row:
    """A row with the description of a measurement, and no results."""
    letters = {x for pattern in case.parsed.inputs.values() for x in pattern.letters}
    sizes = {letter: case.layout.sizes[letter] for letter in "btshnudem" if letter in letters}
    where = (case.library, case.device or "cpu", case.dtype)
    return Row(
        case.name, str(case.parsed), case.work, *where, sizes, asked=case.backend or "default"
    )


def plan(case: BenchCase, row: Row) -> None:
    """Write the backends to the row, and refuse sizes at which the reference is too expensive."""
    m, layout, library = case.parsed, case.call_layout, case.arrays
    few = layout._replace(t=1, s=1) if case.work == "decode" else layout
    like = {n: library.array(np.zeros(p.shape(few.sizes)), case.dtype) for n, p in m.inputs.items()}
    row.device = machine.device_name(library, next(iter(like.values())))
    names = allowed(case.backend)
    if case.work == "decode":
        cache = m.init_cache(**like, capacity=layout.t)
        explanation = m.explain(**like, cache=cache, backend=names)
    else:
        verb = "forward" if case.work == "forward" else "vjp"
        explanation = m.explain(**like, verb=verb, backend=names)
    row.backends = list(explanation.backends)
    if names is not None and names[0] not in row.backends:
        raise UnsupportedError(f"{names[0]} supports none of this:\n{explanation}")
    is_quadratic = any(
        call.backend.name == "reference" and any(map(keeps_tokens, call.piece.program.leaves))
        for call in explanation.plan.calls
    )
    if is_quadratic and layout.b * layout.h * layout.t * layout.s > 16 * LARGEST:
        raise UnsupportedError(
            f"the reference would run a piece of this, and needs memory quadratic in t={layout.t}"
        )
