"""Stage 2: the conformance suite's smallest level, every mechanism on the three kernel backends."""

from __future__ import annotations

from precondattn_gpu.mechanisms import in_turns
from precondattn_gpu.options import RunOptions
from precondattn_gpu.suite import conformance
from precondattn_gpu.task import ProcessTask


def tasks(options: RunOptions) -> list[ProcessTask]:
    """One task for each mechanism and backend."""
    return [
        conformance(
            f"{backend} {mechanism}",
            backend,
            options,
            "--mechanism",
            mechanism,
            level="smoke",
            seconds=45.0,
        )
        for backend, mechanism in in_turns()
    ]
