"""Stage 6: the whole conformance suite, by mechanism and dtype, the checks in two parts."""

from __future__ import annotations

from precondattn_gpu.mechanisms import in_turns
from precondattn_gpu.options import RunOptions
from precondattn_gpu.suite import conformance
from precondattn_gpu.task import ProcessTask

DTYPES = ("bfloat16", "float16", "float32")


def tasks(options: RunOptions) -> list[ProcessTask]:
    """The tasks of the stage. bfloat16 is first: it is the usual training dtype."""
    return [
        conformance(
            f"{backend} {mechanism} {dtype} {part}",
            backend,
            options,
            *("--mechanism", mechanism, "--dtype", dtype),
            *(word for check in checks for word in ("--check", check)),
            level="full",
            seconds=75.0,
        )
        for dtype in DTYPES
        for backend, mechanism in in_turns()
        for part, checks in parts().items()
    ]


def parts() -> dict[str, tuple[str, ...]]:
    """The suite's checks in two parts: those that use a cache, and all others."""
    from precondattn_conformance.checks import CHECKS

    cached = tuple(name for name in CHECKS if name in ("caching", "states", "packing"))
    return {"calls": tuple(name for name in CHECKS if name not in cached), "caches": cached}
