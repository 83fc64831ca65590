"""Faults written by hand, because no operator makes them: one idea in each file."""

from precondattn_conformance.faults.fault import Fault
from precondattn_conformance.faults.written_by_hand import (
    attention,
    frameworks,
    masks,
    shapes,
    states,
)

MODULES = (attention, states, masks, shapes, frameworks)


def faults() -> list[Fault]:
    """All faults in these modules."""
    return [fault for module in MODULES for fault in module.faults()]
