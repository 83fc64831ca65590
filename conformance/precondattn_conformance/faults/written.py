"""How a fault of one piece of mathematics is written down."""

from __future__ import annotations

import precondattn as pa
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    STEP_BACKWARD,
    Change,
    Fault,
)

Everywhere = (FORWARD, BACKWARD, STEP, STEP_BACKWARD)


def written(
    mechanism: str,
    stages: tuple[str, ...] | str,
    detail: str,
    change: Change,
    *,
    carrier: str = "leaves",
    subject: str = "",
    operator: str = "",
    library: str = "numpy",
) -> Fault:
    """A fault; its subject is the mechanism itself, where nothing else is said."""
    own = pa.parse(mechanism)
    stages = (stages,) if isinstance(stages, str) else stages
    return Fault(subject or own.name, str(own), stages, carrier, operator, detail, change, library)
