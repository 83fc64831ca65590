"""The host's time of a call, without a GPU: Python, PyTorch's dispatcher and Triton's launcher.

    python -m precondattn_gpu.host_time [--match TEXT] [--save FILE --column NAME]

The calls run on the absent device, with a stub of Triton's driver. What is left out is what the
driver itself takes: about 2 µs for each kernel that is launched. The time is the processor's, the
least of several rounds, so that other processes disturb it little; it differs between machines.
"""

from __future__ import annotations

import gc
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from precondattn_conformance.machine_names import processor
from precondattn_gpu.absent_gpu import absent_gpu
from precondattn_gpu.call_counts import counts_of
from precondattn_gpu.headline_calls import CALLS, ready

ROUNDS, CALLS_OF_ROUND = 30, 8


def main(
    match: Annotated[str, typer.Option(help="only calls whose name has this text")] = "",
    save: Annotated[Path | None, typer.Option(help="a JSON file to add the numbers to")] = None,
    column: Annotated[str, typer.Option(help="the name of these numbers in the file")] = "now",
) -> None:
    """Measure the calls of the headlines, and print or save their counts and times."""
    rows = {}
    with absent_gpu() as (device, launches):
        for call in CALLS:
            if match not in call.name:
                continue
            counts = counts_of(call, device, launches)
            rows[call.name] = {
                "launches": counts.launches,
                "operators": counts.operator_count,
                "bytes": counts.bytes,
                "launched_bytes": counts.launched_bytes,
                "microseconds": round(microseconds(ready(call, device)), 1),
            }
            print(f"{call.name:44s} {rows[call.name]}", flush=True)
    if save is not None:
        known = json.loads(save.read_text()) if save.exists() else {}
        known[column] = {"processor": processor(), **versions(), "calls": rows}
        save.write_text(json.dumps(known, indent=1) + "\n")


def microseconds(call: Callable[[], object]) -> float:
    """The processor's time of a call, in the best of several rounds."""
    for _ in range(3):
        call()
    times = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(ROUNDS):
            start = time.process_time()
            for _ in range(CALLS_OF_ROUND):
                call()
            times.append(time.process_time() - start)
    finally:
        gc.enable()
    return min(times) / CALLS_OF_ROUND * 1e6


def versions() -> dict[str, str]:
    import torch
    import triton

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


if __name__ == "__main__":
    typer.run(main)
