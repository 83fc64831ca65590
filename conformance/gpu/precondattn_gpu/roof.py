"""Checks that the compilers of CuPy and Pallas work, and measures the device's rates."""

from __future__ import annotations

import json

from precondattn_gpu import alive, shipped
from precondattn_gpu.options import RunOptions, variables
from precondattn_gpu.task import FAILED, PASSED, Finished, ProcessTask, TaskOutcome

PROBES = ("cupy unit_rows bfloat16 64", "pallas softmax bfloat16 64")
"""Probe calls that compile quickly."""


def probes(options: RunOptions) -> list[ProcessTask]:
    """One probe call each for CuPy and Pallas."""
    calls = [call for name in ("cupy", "pallas") for call in shipped.calls(name)]
    return [alive.task(call, options) for call in calls if call.name in PROBES]


def rates(options: RunOptions) -> list[ProcessTask]:
    """The task that measures the rates, which needs an idle device."""
    task = ProcessTask(
        "rates",
        (
            *("-m", "precondattn_gpu.rates", "--device", options.device),
            *(("--ptxas", options.ptxas) if options.ptxas else ()),
            *("--result", "{result}"),
        ),
        outcome_of,
        timeout=40.0,
        environment=variables("triton", options),
        worker="headline",
    )
    return [task]


def outcome_of(finished: Finished) -> TaskOutcome:
    if not finished.result.exists():
        return TaskOutcome(FAILED, f"exit code {finished.code}\n{finished.output}")
    found = json.loads(finished.result.read_text())
    text = f"{found['flops'] / 1e12:.0f} TFLOP/s in a product, {found['bytes'] / 1e12:.2f} TB/s"
    if found["is_other_assembler"]:
        # Triton falls back silently to its own assembler if the given one does not start.
        return TaskOutcome(FAILED, f"Triton uses {found['versions']['assembler']}; {text}", found)
    return TaskOutcome(PASSED, text, found)
