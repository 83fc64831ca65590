"""Stage 4: the smallest calls under compute-sanitizer: accesses outside of arrays, and races."""

from __future__ import annotations

import re
from dataclasses import replace

from precondattn_gpu import alive, shipped
from precondattn_gpu.call import NO_POOL
from precondattn_gpu.options import BACKENDS, RunOptions
from precondattn_gpu.task import FAILED, PASSED, WRONG, Finished, ProcessTask, TaskOutcome

TOOLS = ("memcheck", "racecheck")
FOUND = 86
"""The exit code that means: the tool has found an error."""

OWN_ALLOCATIONS = {
    "triton": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "pallas": {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
    "cupy": {NO_POOL: "1"},
}
"""Environment variables that give each array its own allocation. In a memory pool, an access
outside of an array may fall inside another one, which memcheck does not detect."""


def tasks(options: RunOptions) -> list[ProcessTask]:
    """The narrowest call of each mechanism, by each tool."""
    calls = [call for backend in BACKENDS for call in narrowest(shipped.calls(backend))]
    return [task(call, tool, options) for tool in TOOLS for call in calls]


def narrowest(calls: list[shipped.ShippedCall]) -> list[shipped.ShippedCall]:
    """The call with the narrowest rows for each mechanism and dtype."""
    best: dict[tuple[str, str, bool], shipped.ShippedCall] = {}
    for call in calls:
        key = call.mechanism, call.dtype, call.is_step
        if key not in best or call.d + call.e < best[key].d + best[key].e:
            best[key] = call
    return list(best.values())


def task(call: shipped.ShippedCall, tool: str, options: RunOptions) -> ProcessTask:
    plain = alive.task(call, options)
    return replace(
        plain,
        name=f"{tool} {call.name}",
        prefix=(*prefix(tool), "--target-processes", "all", "--print-limit", "5"),
        worker="",
        read=read,
        seconds=60.0,
        timeout=240.0,
        environment={**plain.environment, **OWN_ALLOCATIONS[call.backend]},
    )


def prefix(tool: str) -> tuple[str, ...]:
    """The command prefix that runs a program under a tool."""
    return ("compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND))


def read(finished: Finished) -> TaskOutcome:
    """The tool's findings; a wrong result counts as one."""
    reports = re.findall(r"^=+ (.*)$", finished.output, re.MULTILINE)
    text = "\n".join(reports)
    if finished.code == FOUND:
        return TaskOutcome(WRONG, text)
    if not any("SUMMARY" in line for line in reports):
        return TaskOutcome(FAILED, f"exit code {finished.code}, no summary\n{finished.output}")
    plain = alive.read(finished)
    return plain if plain.status != PASSED else TaskOutcome(PASSED, reports[-1], plain.data)
