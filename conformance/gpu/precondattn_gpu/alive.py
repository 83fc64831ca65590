"""Stage 1: does every kernel run at all? Each call of `shipped`, in a process of its own."""

from __future__ import annotations

import json

from precondattn_gpu import shipped
from precondattn_gpu.call import LAUNCH
from precondattn_gpu.mechanisms import interleaved
from precondattn_gpu.options import BACKENDS, Options, library_of, variables
from precondattn_gpu.task import CRASHED, Finished, Outcome, Task

BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}
"""An error is raised by the launch of the kernel that made it, not by a later one."""


def tasks(options: Options) -> list[Task]:
    """The calls of each backend in turn, so that each backend is seen early."""
    lists = [[task(call, options) for call in shipped.calls(name)] for name in BACKENDS]
    return interleaved(lists)


def task(call: shipped.Call, options: Options) -> Task:
    sizes = tuple(map(str, (call.d, call.e, call.tokens)))
    arguments = ["-m", "precondattn_gpu.call", call.backend, call.expression, call.dtype, *sizes]
    arguments += ["--library", library_of(call.backend, options), "--result", "{result}"]
    if not options.is_cpu and call.backend != "cupy":
        arguments += ["--device", options.device]
    if call.is_step:
        arguments.append("--step")
    return Task(
        call.name,
        tuple(arguments),
        read,
        seconds=25.0,
        timeout=240.0 if not options.is_cpu else 1800.0,
        environment={**BLOCKING, **variables(call.backend, options)},
        data={"backend": call.backend, "mechanism": call.mechanism, "dtype": call.dtype},
    )


def read(finished: Finished) -> Outcome:
    """The process's own result, or the launch at which it ended."""
    launches = [line for line in finished.output.splitlines() if line.startswith(LAUNCH)]
    text = "\n".join(line for line in finished.output.splitlines() if not line.startswith(LAUNCH))
    last = launches[-1].removeprefix(LAUNCH) if launches else "none"
    if not finished.result.exists():
        message = f"exit code {finished.code} after the launch of {last}\n{text}"
        return Outcome(CRASHED, message, {"last_launch": last})
    result = json.loads(finished.result.read_text())
    status, message = result.pop("status"), result.pop("message", "")
    if status == "failed":
        message = f"{message} (after the launch of {last})\n{text}"
        result["last_launch"] = last
    return Outcome(status, message, result)
