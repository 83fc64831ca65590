"""The calls of `alive` in the order of the first run, which begins with the usual training dtype.

A       bfloat16, width 128
B       float16 and float32, width 128; then width 64; then 256 and 512; the narrow ones last
bundled Triton's calls of A, compiled with the assembler that is part of the Triton package
"""

from __future__ import annotations

from dataclasses import replace

from precondattn_gpu import alive, shipped
from precondattn_gpu.mechanisms import interleaved
from precondattn_gpu.options import BACKENDS, RunOptions
from precondattn_gpu.task import ProcessTask

WIDTHS = (128, 64, 256, 512, 32, 16, 720)
DTYPES = ("bfloat16", "float16", "float32", "float64")


def is_first(call: shipped.ShippedCall) -> bool:
    """Whether a call belongs to A."""
    return call.dtype == DTYPES[0] and max(call.d, call.e) == WIDTHS[0]


def first(options: RunOptions) -> list[ProcessTask]:
    """The calls of part A, from each backend in turn."""
    lists = [[c for c in shipped.calls(name) if is_first(c)] for name in BACKENDS]
    return _tasks(options, interleaved(lists))


def turn(call: shipped.ShippedCall) -> tuple[int, int]:
    """The sort key of a call."""
    return WIDTHS.index(max(call.d, call.e)), DTYPES.index(call.dtype)


def others(options: RunOptions) -> list[ProcessTask]:
    """The calls of part B."""
    calls = interleaved([shipped.calls(name) for name in BACKENDS])
    return _tasks(options, sorted((c for c in calls if not is_first(c)), key=turn))


def bundled(options: RunOptions) -> list[ProcessTask]:
    """Triton's calls of part A, compiled with the assembler that is part of the Triton package."""
    calls = [call for call in shipped.calls("triton") if is_first(call)]
    return _tasks(replace(options, ptxas=""), calls)


def _tasks(options: RunOptions, calls: list[shipped.ShippedCall]) -> list[ProcessTask]:
    return [alive.task(call, options) for call in calls if options.match in call.name]
