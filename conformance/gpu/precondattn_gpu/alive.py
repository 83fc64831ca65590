"""Whether every kernel runs and its result is right, by each call of `shipped`.

A       bfloat16, width 128: the usual training dtype
B       float16 and float32, width 128; then width 64; then 256 and 512; the narrow ones last
bundled Triton's calls of A, compiled with the assembler that is part of the Triton package

Calls run one after another in workers. A call that does not pass ends its worker; the other calls
are not affected.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from precondattn_gpu import shipped
from precondattn_gpu.call import LAUNCH, LEDGER
from precondattn_gpu.options import BACKENDS, RunOptions, library_of, variables
from precondattn_gpu.task import CRASHED, Finished, ProcessTask, TaskOutcome

if TYPE_CHECKING:
    from precondattn.json_types import JsonObject

BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}
"""An error is raised by the launch of the kernel that made it, not by a later one."""

TIMEOUT = 120.0
"""Seconds after which a call counts as hanging. The kernels of three calls take longer to compile;
Triton keeps those that it has compiled for the next attempt."""

WIDTHS = (128, 64, 256, 512, 32, 16, 720)
DTYPES = ("bfloat16", "float16", "float32", "float64")


def is_first(call: shipped.ShippedCall) -> bool:
    """Whether a call belongs to A."""
    return call.dtype == DTYPES[0] and max(call.d, call.e) == WIDTHS[0]


def first_calls(options: RunOptions) -> list[ProcessTask]:
    """The calls of part A, from each backend in turn."""
    lists = [[c for c in shipped.calls(name) if is_first(c)] for name in BACKENDS]
    return _tasks(options, shipped.interleaved(lists))


def others(options: RunOptions) -> list[ProcessTask]:
    """The calls of part B."""
    calls = shipped.interleaved([shipped.calls(name) for name in BACKENDS])
    return _tasks(options, sorted((c for c in calls if not is_first(c)), key=_turn))


def bundled(options: RunOptions) -> list[ProcessTask]:
    """Triton's calls of part A, compiled with the assembler that is part of the Triton package."""
    calls = [call for call in shipped.calls("triton") if is_first(call)]
    return _tasks(replace(options, ptxas=""), calls)


def _turn(call: shipped.ShippedCall) -> tuple[int, int]:
    """The sort key of a call."""
    return WIDTHS.index(max(call.d, call.e)), DTYPES.index(call.dtype)


def _tasks(options: RunOptions, calls: list[shipped.ShippedCall]) -> list[ProcessTask]:
    return [task(call, options) for call in calls if options.match in call.name]


def task(call: shipped.ShippedCall, options: RunOptions) -> ProcessTask:
    """A call in a worker."""
    sizes = tuple(map(str, (call.d, call.e, call.tokens)))
    arguments = ["-m", "precondattn_gpu.call", call.backend, call.expression, call.dtype, *sizes]
    arguments += ["--library", library_of(call.backend, options), "--result", "{result}"]
    if not options.is_cpu and call.backend != "cupy":
        arguments += ["--device", options.device]
    if call.is_step:
        arguments.append("--step")
    return ProcessTask(
        call.name,
        tuple(arguments),
        outcome_of,
        timeout=TIMEOUT if not options.is_cpu else 1800.0,
        environment={**BLOCKING, **variables(call.backend, options)},
        worker=call.backend,
        found=entries_in,
        data={
            "backend": call.backend,
            "mechanism": call.mechanism,
            "dtype": call.dtype,
            "width": max(call.d, call.e),
        },
    )


def entries_in(output: str) -> JsonObject:
    """The entries of the ledger that a call shows if it agrees with the oracle."""
    lines = [line for line in output.splitlines() if line.startswith(LEDGER)]
    return {"ledger": json.loads(lines[-1].removeprefix(LEDGER))} if lines else {}


def outcome_of(finished: Finished) -> TaskOutcome:
    """The process's own result, or the launch at which it ended."""
    launches = [line for line in finished.output.splitlines() if line.startswith(LAUNCH)]
    others = (
        line for line in finished.output.splitlines() if not line.startswith((LAUNCH, LEDGER))
    )
    text = "\n".join(others)
    last = launches[-1].removeprefix(LAUNCH) if launches else "none"
    if not finished.result.exists():
        message = f"exit code {finished.code} after the launch of {last}\n{text}"
        return TaskOutcome(CRASHED, message, {"last_launch": last})
    result = json.loads(finished.result.read_text())
    status, message = result.pop("status"), result.pop("message", "")
    if status == "failed":
        message = f"{message} (after the launch of {last})\n{text}"
        result["last_launch"] = last
    return TaskOutcome(status, message, result)
