"""Stage 1: whether every kernel runs and its result is right, by each call of `shipped`.

Calls run one after another in workers. A call that does not pass ends its worker; the other calls
are not affected.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from precondattn_gpu import estimates, shipped
from precondattn_gpu.call import LAUNCH, LEDGER
from precondattn_gpu.mechanisms import interleaved
from precondattn_gpu.options import BACKENDS, RunOptions, library_of, variables
from precondattn_gpu.task import CRASHED, Finished, ProcessTask, TaskOutcome

if TYPE_CHECKING:
    from precondattn.json_types import JsonObject

BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}
"""An error is raised by the launch of the kernel that made it, not by a later one."""

TIMEOUT = 45.0
"""Seconds after which a call counts as hanging, unless its kernels take long to compile."""


def tasks(options: RunOptions) -> list[ProcessTask]:
    """The calls of each backend in turn, so that each backend is seen early."""
    lists = [[task(call, options) for call in shipped.calls(name)] for name in BACKENDS]
    return interleaved(lists)


def task(call: shipped.ShippedCall, options: RunOptions) -> ProcessTask:
    """A call in a worker."""
    sizes = tuple(map(str, (call.d, call.e, call.tokens)))
    arguments = ["-m", "precondattn_gpu.call", call.backend, call.expression, call.dtype, *sizes]
    arguments += ["--library", library_of(call.backend, options), "--result", "{result}"]
    if not options.is_cpu and call.backend != "cupy":
        arguments += ["--device", options.device]
    if call.is_step:
        arguments.append("--step")
    seconds = estimates.seconds(call)
    return ProcessTask(
        call.name,
        tuple(arguments),
        read,
        seconds=seconds,
        timeout=max(TIMEOUT, 2 * seconds) if not options.is_cpu else 1800.0,
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


def read(finished: Finished) -> TaskOutcome:
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
