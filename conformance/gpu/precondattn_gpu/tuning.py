"""Stage 5: times the candidate configurations of the Triton kernels that take most time.

`winners` writes those that were faster to a file of the backend, by the name of the device.
"""

from __future__ import annotations

import json

from precondattn_gpu.options import RunOptions, variables
from precondattn_gpu.task import FAILED, Finished, ProcessTask, TaskOutcome
from precondattn_gpu.tune import CALLS

WIDTHS = (128, 64)


def tasks(options: RunOptions) -> list[ProcessTask]:
    """One task for each kernel and width."""
    from precondattn_triton.candidates import candidates

    return [
        ProcessTask(
            f"{kernel} {width}",
            arguments(kernel, width, options),
            read,
            seconds=60.0,
            timeout=300.0,
            environment=variables("triton", options) if not options.is_cpu else {},
            data={"backend": "triton"},
        )
        for width in WIDTHS
        for kernel in CALLS
        if candidates(kernel, width)
    ]


def arguments(kernel: str, width: int, options: RunOptions) -> tuple[str, ...]:
    """Arguments of the process that tries one kernel's candidates."""
    module = ("-m", "precondattn_gpu.tune", kernel, str(width))
    return (*module, "--device", options.device, "--result", "{result}")


def read(finished: Finished) -> TaskOutcome:
    if not finished.result.exists():
        return TaskOutcome(FAILED, f"exit code {finished.code}\n{finished.output}")
    result = json.loads(finished.result.read_text())
    return TaskOutcome(result.pop("status"), result.pop("message"), result)
