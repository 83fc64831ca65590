"""A shorthand for faults of one piece of mathematics, or of one algorithm."""

from __future__ import annotations

import precondattn as pa
from precondattn_conformance.faults.fault import Change, Fault


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
    """A fault. By default its subject is the mechanism itself."""
    parsed = pa.parse(mechanism)
    stages = (stages,) if isinstance(stages, str) else stages
    named = subject or parsed.name, str(parsed)
    return Fault(*named, stages, carrier, operator, detail, change, library)
