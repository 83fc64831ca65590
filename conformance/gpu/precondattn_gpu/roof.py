"""The device's own rates, and whether the two compilers besides Triton work at all."""

from __future__ import annotations

import json

from precondattn_gpu import alive, shipped
from precondattn_gpu.options import Options, variables
from precondattn_gpu.task import FAILED, PASSED, Finished, Outcome, Task

PROBES = ("cupy unit_rows bfloat16 64", "pallas softmax bfloat16 64")
"""Calls that are quick to compile."""


def tasks(options: Options) -> list[Task]:
    rates = Task(
        "rates",
        ("-m", "precondattn_gpu.rates", "--device", options.device, "--result", "{result}"),
        read,
        seconds=4.0,
        timeout=40.0,
        environment=variables("triton", options),
        worker="headline",
    )
    calls = [call for name in ("cupy", "pallas") for call in shipped.calls(name)]
    return [rates, *(alive.task(call, options) for call in calls if call.name in PROBES)]


def read(finished: Finished) -> Outcome:
    if not finished.result.exists():
        return Outcome(FAILED, f"exit code {finished.code}\n{finished.output}")
    rates = json.loads(finished.result.read_text())
    text = f"{rates['flops'] / 1e12:.0f} TFLOP/s in a product, {rates['bytes'] / 1e12:.2f} TB/s"
    return Outcome(PASSED, text, rates)
