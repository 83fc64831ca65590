"""Calls under compute-sanitizer's memcheck, which finds accesses outside of arrays."""

from __future__ import annotations

import re
from dataclasses import replace

from precondattn_gpu import alive, shipped
from precondattn_gpu.call import NO_POOL
from precondattn_gpu.options import RunOptions
from precondattn_gpu.task import FAILED, PASSED, WRONG, Finished, ProcessTask, TaskOutcome

FOUND = 86
"""The exit code that means: the tool has found an error."""

OWN_ALLOCATIONS = {
    "triton": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    "pallas": {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
    "cupy": {NO_POOL: "1"},
}
"""Environment variables that give each array its own allocation. In a memory pool, an access
outside of an array may fall inside another one, which memcheck does not detect."""


PREFIX = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", str(FOUND))
"""The command that runs a program under memcheck."""


def task(call: shipped.ShippedCall, options: RunOptions) -> ProcessTask:
    plain = alive.task(call, options)
    return replace(
        plain,
        name=f"memcheck {call.name}",
        prefix=(*PREFIX, "--target-processes", "all", "--print-limit", "5"),
        worker="",
        outcome_of=outcome_of,
        environment={**plain.environment, **OWN_ALLOCATIONS[call.backend]},
    )


def outcome_of(finished: Finished) -> TaskOutcome:
    """The tool's findings; a wrong result counts as one."""
    reports = re.findall(r"^=+ (.*)$", finished.output, re.MULTILINE)
    text = "\n".join(reports)
    if finished.code == FOUND:
        return TaskOutcome(WRONG, text)
    if not any("SUMMARY" in line for line in reports):
        return TaskOutcome(FAILED, f"exit code {finished.code}, no summary\n{finished.output}")
    plain = alive.outcome_of(finished)
    return plain if plain.status != PASSED else TaskOutcome(PASSED, reports[-1], plain.data)
