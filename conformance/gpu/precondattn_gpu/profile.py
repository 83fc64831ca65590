"""Stage 7: hardware counters for every kernel of the headline calls, by Nsight Compute.

For each kernel: its time, the share of tensor throughput and of bandwidth that it reached, and what
its warps waited for. `farthest` names the kernels that are farthest from their roof.
"""

from __future__ import annotations

import csv
import re
from typing import TYPE_CHECKING, NamedTuple

from precondattn_gpu.options import RunOptions
from precondattn_gpu.task import FAILED, PASSED, Finished, ProcessTask, TaskOutcome

if TYPE_CHECKING:
    from precondattn.json_types import JsonObject


class ProfiledCall(NamedTuple):
    """A call whose kernels are measured."""

    backend: str
    mechanism: str
    work: str
    tokens: int
    width: int
    batch: int = 1

    @property
    def name(self) -> str:
        return f"{self.backend} {self.mechanism} {self.work} {self.width} {self.tokens}"


FORWARD, BOTH = "forward", "forward_backward"
CALLS = (
    ProfiledCall("triton", "lucid_solve", FORWARD, 8192, 128),
    ProfiledCall("triton", "lucid_solve", BOTH, 8192, 128),
    ProfiledCall("triton", "laser", BOTH, 8192, 128),
    ProfiledCall("triton", "gated_delta", FORWARD, 8192, 128, batch=4),
    ProfiledCall("triton", "gated_delta", BOTH, 8192, 128, batch=4),
    ProfiledCall("triton", "path", BOTH, 8192, 128),
    ProfiledCall("cupy", "lucid_solve", FORWARD, 8192, 128),
    ProfiledCall("cupy", "lucid_solve", BOTH, 8192, 128),
    ProfiledCall("triton", "lucid_solve", FORWARD, 8192, 64),
    ProfiledCall("triton", "lucid_solve", BOTH, 8192, 64),
    ProfiledCall("triton", "laser", BOTH, 8192, 64),
    ProfiledCall("triton", "gla", BOTH, 8192, 128),
    ProfiledCall("triton", "ccq(gated_delta)", FORWARD, 8192, 128),
    ProfiledCall("triton", "lucid_solve", FORWARD, 32768, 128),
    ProfiledCall("triton", "lucid_solve", BOTH, 32768, 128),
    ProfiledCall("triton", "laser", BOTH, 32768, 128),
    ProfiledCall("cupy", "laser", BOTH, 8192, 128),
    ProfiledCall("cupy", "gated_delta", BOTH, 8192, 128, batch=4),
)
"""The profiled calls, with 16 heads: the sizes for which kernels were predicted
(`docs/make_predictions.py`)."""

SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "WarpStateStats", "Occupancy", "LaunchStats")
TIME = "gpu__time_duration.sum"
BANDWIDTH = "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"
TENSOR = re.compile(r"^sm__(inst_executed_)?pipe_tensor.*pct_of_peak_sustained_(active|elapsed)$")
STALL = re.compile(r"^smsp__average_warps?_issue_stalled_(\w+?)_per_issue_active\.ratio$")
UNITS = {"ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3}
"""Seconds, by the unit of a time."""
MOST_STALLS = 4


def tasks(options: RunOptions) -> list[ProcessTask]:
    """One task for each call. The device's clocks are not changed."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    ncu = ("ncu", "--profile-from-start", "off", "--clock-control", "none", *sections)
    return [
        ProcessTask(
            call.name,
            arguments(call),
            read,
            seconds=45.0,
            timeout=300.0,
            prefix=(*ncu, "--target-processes", "all", "--csv", "--page", "raw"),
            data=call._asdict(),
        )
        for call in CALLS
    ]


def arguments(call: ProfiledCall) -> tuple[str, ...]:
    """Arguments of the profiled process."""
    sizes = map(str, (call.batch, call.tokens, call.width))
    module = ("-m", "precondattn_gpu.profile_call")
    return (*module, call.backend, call.mechanism, call.work, *sizes)


def read(finished: Finished) -> TaskOutcome:
    kernels = kernels_of(finished.output)
    if finished.code or not kernels:
        return TaskOutcome(FAILED, f"exit code {finished.code}\n{finished.output}")
    total = sum(kernel["seconds"] for kernel in kernels)
    return TaskOutcome(
        PASSED, f"{len(kernels)} launches, {1e3 * total:.3f} ms", {"kernels": kernels}
    )


def kernels_of(output: str) -> list[JsonObject]:
    """Kernel launches in the profiler's raw page: a row of names, of units, and of each launch."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        return []
    names, units, *rows = csv.reader(lines)
    unit_of = dict(zip(names, units, strict=False))
    return [_kernel(dict(zip(names, row, strict=False)), unit_of) for row in rows]


def _kernel(row: dict[str, str], units: dict[str, str]) -> JsonObject:
    stalls = {m[1]: number(row[name]) for name in row if (m := STALL.match(name))}
    most = sorted(stalls, key=lambda name: stalls[name], reverse=True)[:MOST_STALLS]
    tensor = [number(row[name]) for name in row if TENSOR.match(name)]
    return {
        "kernel": base_name(row["Kernel Name"]),
        "seconds": number(row[TIME]) * UNITS[units[TIME]],
        "tensor_share": max(tensor) / 100 if tensor else None,
        "bandwidth_share": number(row[BANDWIDTH]) / 100 if BANDWIDTH in row else None,
        "grid": row.get("Grid Size", ""),
        "block": row.get("Block Size", ""),
        "stalls": {name: stalls[name] for name in most},
    }


def base_name(signature: str) -> str:
    """The kernel's name without template arguments and parameters: `void lucid_update<__half,
    128>(…)` gives `lucid_update`."""
    return signature.partition("(")[0].partition("<")[0].removeprefix("void ").strip()


def number(text: str) -> float:
    """A number as the profiler writes it: 12,345.6."""
    return float(text.replace(",", ""))


def farthest(kernels: list[JsonObject], count: int = 3) -> list[JsonObject]:
    """The kernels with the largest gap to the nearer roof: time × (1 − the share reached)."""

    def lost(kernel: JsonObject) -> float:
        share = max(kernel["tensor_share"] or 0.0, kernel["bandwidth_share"] or 0.0)
        return float(kernel["seconds"] * (1 - min(share, 1.0)))

    return sorted(kernels, key=lost, reverse=True)[:count]
