"""How a fault of one piece of mathematics, or of one algorithm, is written down."""

from __future__ import annotations

from typing import Any

import precondattn as pa
from precondattn_conformance.faults.fault import Change, Fault, inside


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


def blocked(
    mechanism: str,
    stages: tuple[str, ...] | str,
    detail: str,
    owner: Any,
    name: str,
    change: Any,
    subject: str = "",
) -> Fault:
    """A fault of the blocked carrier: `owner.name` is `change` of what it was."""
    planted = inside(owner, name, change)
    return written(mechanism, stages, detail, planted, carrier="blocks", subject=subject)
