"""Stage 8: the peak memory of a forward and backward pass, at 32K, 64K and 128K tokens."""

from __future__ import annotations

from precondattn_gpu.options import RunOptions
from precondattn_gpu.suite import benchmark, dtype_of
from precondattn_gpu.task import ProcessTask

SIZES = "b=1,t=32768,h=16,n=16,d=128"
"""The smallest sizes; two and four times as many tokens are measured too."""

CASES = (
    *(("triton", name) for name in ("lucid", "laser", "path", "gated_delta", "ccq(gated_delta)")),
    *(("pallas", name) for name in ("lucid", "gated_delta")),
    ("triton", "softmax"),
)


def tasks(options: RunOptions) -> list[ProcessTask]:
    """One task for each mechanism; each size is measured in a separate process."""
    return [
        benchmark(
            f"{backend} {mechanism}",
            backend,
            options,
            *("--mechanism", mechanism, "--work", "memory", "--sizes", SIZES, "--no-peers"),
            *("--dtype", dtype_of(backend, options)),
            seconds=60.0,
        )
        for backend, mechanism in CASES
    ]
