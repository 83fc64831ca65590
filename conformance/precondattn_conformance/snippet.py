"""Python code that reproduces a failure, for a kernel author to paste."""

from __future__ import annotations

from typing import Any

import precondattn as pa
from precondattn_conformance import libraries
from precondattn_conformance.case import Case
from precondattn_conformance.cases import case_of
from precondattn_conformance.checks import CHECK, Backend
from precondattn_conformance.declared import mechanism_of
from precondattn_conformance.memory_order import laid_out
from precondattn_conformance.oracle import inputs_of


def call_of(text: str, device: str | None = None) -> tuple[pa.Mechanism, dict[str, Any]]:
    """The mechanism of a case, given by its id, and the inputs and masks of its call."""
    case = case_of(text)
    library = libraries.named(case.library, device)
    mechanism = mechanism_of(case.mechanism)
    with library.precision(case.dtype):
        arrays = inputs_of(case.mechanism, case.layout, case.kind, case.dtype)
        inputs = {name: library.array(array, case.dtype) for name, array in arrays.items()}
        inputs = laid_out(library, mechanism, inputs, arrays, case.layout.order)
    masks = {name: library.array(array) for name, array in case.layout.masks().items()}
    return mechanism, inputs | masks


def snippet(case: Case, backend: Backend, device: str | None = None) -> str:
    """Code that runs the case, and code that runs only its call."""
    where = f", device={device!r}" if device else ""
    named = backend if isinstance(backend, str) or backend is None else tuple(backend)
    if isinstance(named, tuple) and len(named) == 1:
        (named,) = named
    call = CHECK[case.check].snippet.format(backend=repr(named), tokens=case.layout.t)
    return (
        f"from precondattn_conformance import call_of, replay\n\n"
        f"case = {case.id!r}\n"
        f"print(replay(case, backend={named!r}{where}))  # The whole check.\n\n"
        f"mechanism, inputs = call_of(case{where})  # Only its call.\n"
        f"{call}\n"
        f'expected = mechanism(**inputs, backend="reference")\n'
    )
