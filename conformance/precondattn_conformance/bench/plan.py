"""The row of a case before it is measured: its description, and the backends that would run."""

from __future__ import annotations

import numpy as np

import precondattn as pa
from precondattn.backend import UnsupportedError
from precondattn_conformance import libraries
from precondattn_conformance.bench import machine
from precondattn_conformance.bench.cases import BenchCase
from precondattn_conformance.bench.computation import allowed
from precondattn_conformance.bench.correct import LARGEST
from precondattn_conformance.bench.cost import keeps_tokens
from precondattn_conformance.bench.record import Row


def empty_row(case: BenchCase, backend: str | None, device: str | None) -> Row:
    """A row with the description of a measurement, and no results."""
    m = pa.parse(case.mechanism)
    letters = {letter for pattern in m.inputs.values() for letter in pattern.letters}
    known = case.layout.sizes
    sizes = {letter: known[letter] for letter in "btshnudem" if letter in letters}
    requested = backend or "default"
    return Row(
        case.name,
        str(m),
        case.work,
        case.library,
        device or "cpu",
        case.dtype,
        sizes,
        requested,
    )


def plan(case: BenchCase, backend: str | None, device: str | None, row: Row) -> None:
    """Write the backends to the row, and refuse sizes at which the reference is too expensive."""
    m, layout = pa.parse(case.mechanism), case.call_layout
    library = libraries.named(case.library, device)
    few = layout._replace(t=1, s=1) if case.work == "decode" else layout
    like = {n: library.array(np.zeros(p.shape(few.sizes)), case.dtype) for n, p in m.inputs.items()}
    row.device = machine.device_name(library, next(iter(like.values())))
    names = allowed(backend)
    if case.work == "decode":
        cache = m.init_cache(**like, capacity=layout.t)
        explanation = m.explain(**like, cache=cache, backend=names)
    else:
        verb = "forward" if case.work == "forward" else "vjp"
        explanation = m.explain(**like, verb=verb, backend=names)
    row.backends = list(explanation.backends)
    if names is not None and names[0] not in row.backends:
        raise UnsupportedError(f"{names[0]} supports none of this:\n{explanation}")
    slow = any(
        call.backend.name == "reference" and any(map(keeps_tokens, call.piece.program.leaves))
        for call in explanation.plan.calls
    )
    if slow and layout.b * layout.h * layout.t * layout.s > 16 * LARGEST:
        raise UnsupportedError(
            f"the reference would run a piece of this, and needs memory quadratic in t={layout.t}"
        )
