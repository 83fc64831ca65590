"""Faults that are written by hand for one piece of mathematics, or for one algorithm."""

from precondattn_conformance.faults.fault import Fault
from precondattn_conformance.faults.written_by_hand import (
    attention,
    autograd,
    axes,
    block_solve,
    caches,
    chunks,
    company,
    half,
    long_masks,
    lucid,
    maps,
    mesa,
    path,
    ragged,
    recurrence,
    reflections,
    row_blocks,
    statistics,
    symmetric_lucid,
    threads,
    whole_sequences,
    widths,
    windows,
)

OF = (
    attention,
    path,
    lucid,
    symmetric_lucid,
    recurrence,
    mesa,
    statistics,
    maps,
    row_blocks,
    block_solve,
    chunks,
    reflections,
    autograd,
    half,
    threads,
    caches,
    axes,
    ragged,
    long_masks,
    widths,
    company,
    whole_sequences,
    windows,
)


def faults() -> list[Fault]:
    """All faults in these modules."""
    return [fault for module in OF for fault in module.faults()]
