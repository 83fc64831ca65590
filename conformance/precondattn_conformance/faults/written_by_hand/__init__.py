"""Faults written by hand, because no operator makes them: one idea in each file."""

from precondattn_conformance.faults.written_by_hand import (
    attention,
    frameworks,
    masks,
    shapes,
    states,
)

FAULTS = (*attention.FAULTS, *states.FAULTS, *masks.FAULTS, *shapes.FAULTS, *frameworks.FAULTS)
