"""Faults written by hand, because no mutant covers them: one idea in each file."""

from precondattn_conformance.faults.fault import Fault
from precondattn_conformance.faults.written_by_hand import (
    attention,
    autograd,
    axes,
    block_solve,
    caches,
    chunks,
    distance,
    half,
    heads,
    iterations,
    long_masks,
    lucid,
    option_pairs,
    outlook,
    pair_masks,
    ragged,
    recurrence,
    reflections,
    row_blocks,
    threads,
    whole_sequences,
    widths,
    windows,
)

OF = (
    attention,
    lucid,
    recurrence,
    whole_sequences,
    heads,
    row_blocks,
    block_solve,
    chunks,
    reflections,
    windows,
    outlook,
    pair_masks,
    iterations,
    autograd,
    half,
    threads,
    caches,
    axes,
    ragged,
    long_masks,
    widths,
    option_pairs,
    distance,
)


def faults() -> list[Fault]:
    """All faults in these modules."""
    return [fault for module in OF for fault in module.faults()]
