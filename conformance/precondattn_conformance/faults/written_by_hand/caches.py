"""Faults of a backend that remembers a cache and does not notice rearranged sequences."""

from __future__ import annotations

from dataclasses import replace

from precondattn.arrays import Array
from precondattn_conformance.faults.fault import STEP, Fault, MethodCall, MethodResult, Truth
from precondattn_conformance.faults.written_by_hand.written import written


def faults() -> list[Fault]:
    """All faults in this file."""
    return [
        written(
            mechanism,
            STEP,
            f"rows of {name} kept since the last step of the same sequences",
            _Remembering(name),
            operator="memory of a cache",
        )
        for mechanism, name in (("softmax", "key"), ("lucid_solve", "solved"))
    ]


class _Remembering:
    """Rows of a buffer that existed in the last step are replaced by that step's rows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kept: Array = None

    def __call__(self, truth: Truth, call: MethodCall) -> MethodResult:
        buffer = call.past[self.name]
        held = int(call.frame.q_position[:, 0].min())
        seen, self.kept = self.kept, buffer[:, :held].copy()
        if seen is None or not held:  # This is a new cache.
            return truth(call)
        sequences, rows = (
            min(sizes) for sizes in zip(seen.shape[:2], self.kept.shape, strict=False)
        )
        mixed = buffer.copy()
        mixed[:sequences, :rows] = seen[:sequences, :rows]
        return truth(replace(call, past={**call.past, self.name: mixed}))
