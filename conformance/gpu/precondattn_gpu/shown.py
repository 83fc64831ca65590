"""Ledger entries of a call that agreed with the oracle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeGuard

from precondattn.json_types import JsonObject
from precondattn_conformance.inputs import CallLayout

if TYPE_CHECKING:
    from precondattn.backend import Backend
    from precondattn.dispatch.explanation import Explanation
    from precondattn.dispatch.plan import PlannedCall
    from precondattn.kernel_backend.backend import KernelBackend


def plan_of_call(
    mechanism: str,
    backends: tuple[str, ...],
    library: str,
    layout: CallLayout,
    dtype: str,
    device: str | None,
) -> Explanation:
    """The plan of a full call with its gradient."""
    import precondattn as pa
    from precondattn.dispatch.described import explain_described

    parsed = pa.parse(mechanism)
    sizes = {name: layout.sizes[name] for name in "btshnude"}
    return explain_described(parsed, library, dtype, device, "vjp", sizes, backend=backends)


def entries_of(
    explanation: Explanation, backend: str, layout: CallLayout, verbs: Iterable[str]
) -> list[JsonObject]:
    """Ledger entries of the pieces of a plan that a backend runs; none if a CPU interprets them."""
    return [
        call.backend.ledger_entry(
            call.piece, replace(explanation.request, verb=verb, shapes=_shapes(call, layout))
        )._asdict()
        for call in explanation.plan.calls
        if call.backend.name == backend and _runs_kernels(call.backend)
        for verb in verbs
    ]


def _shapes(call: PlannedCall, layout: CallLayout) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The shapes of a piece's own inputs."""
    inputs = call.piece.inputs
    return tuple((name, inputs[name].shape(layout.sizes)) for name in inputs)


def _runs_kernels(backend: Backend) -> TypeGuard[KernelBackend]:
    return getattr(backend, "has_ledger", False) and not backend.only_by_name
