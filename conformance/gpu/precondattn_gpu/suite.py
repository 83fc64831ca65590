"""Tasks that run `precondattn conformance` or `precondattn bench`, and read what they save."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from precondattn_gpu.options import HELPER, RunOptions, device_arguments, library_of, variables
from precondattn_gpu.task import (
    FAILED,
    PASSED,
    UNSUPPORTED,
    WRONG,
    Finished,
    ProcessTask,
    TaskOutcome,
)

if TYPE_CHECKING:
    from precondattn.json_types import JsonObject

COMMAND = ("-m", "precondattn")
SHOWN = 5
"""The number of failures whose whole text is saved."""


def conformance(
    name: str, backend: str, options: RunOptions, *filters: str, level: str, seconds: float
) -> ProcessTask:
    """A part of the conformance suite on one backend."""
    library = library_of(backend, options)
    arguments = [*COMMAND, "conformance", "--backend", backend, "--backend", HELPER[backend]]
    arguments += ["--library", library, "--level", level, "--jobs", "1", "--timeout", "120"]
    # Arrays of CuPy and NumPy need no `--device`.
    if library not in ("cupy", "numpy"):
        arguments += device_arguments(options)
    arguments += [*filters, "--record", "{result}"]
    return ProcessTask(
        name,
        tuple(arguments),
        read_conformance,
        seconds=seconds,
        timeout=460.0 if not options.is_cpu else 7200.0,
        environment=variables(backend, options),
        data={"backend": backend},
    )


def read_conformance(finished: Finished) -> TaskOutcome:
    """The counts of outcomes, and the texts of the first failures."""
    from precondattn_conformance.report.record import load

    if not finished.result.exists():
        return TaskOutcome(FAILED, f"exit code {finished.code}, no record\n{finished.output}")
    record = load(finished.result)
    counts = {s: record.count(s) for s in ("passed", "failed", "unsupported") if record.count(s)}
    worst = max((r.error / r.bound for r in record.outcomes if r.error and r.bound), default=0.0)
    data: JsonObject = {"counts": counts, "error_by_bound": worst}
    failures = [r for r in record.outcomes if r.status == "failed"]
    data["failures"] = [r.id for r in failures]
    text = ", ".join(f"{n} {s}" for s, n in counts.items())
    if not record.complete:
        return TaskOutcome(FAILED, f"{text}; it ended while {record.running} ran", data)
    if failures:
        shown = "\n\n".join(f"{r.id}\n{r.reason}\n{r.details}" for r in failures[:SHOWN])
        return TaskOutcome(WRONG, f"{text}\n\n{shown}", data)
    if "passed" not in counts:
        return TaskOutcome(UNSUPPORTED, text or "no case", data)
    return TaskOutcome(PASSED, text, data)


def benchmark(
    name: str, backend: str, options: RunOptions, *arguments: str, seconds: float
) -> ProcessTask:
    """One run of `precondattn bench`; its record is saved with the result."""
    library = library_of(backend, options)
    command = [*COMMAND, "bench", *device_arguments(options), "--library", library]
    command += ["--backend", f"{backend},{HELPER[backend]}", *arguments, "--save", "{result}"]
    if options.is_cpu:
        command.append("--quick")
    return ProcessTask(
        name,
        tuple(command),
        read_benchmark,
        seconds=seconds,
        timeout=300.0,
        environment=variables(backend, options),
        data={"backend": backend},
    )


def dtype_of(backend: str, options: RunOptions) -> str:
    """bfloat16, or float32 for CUDA kernels simulated on NumPy, which has no bfloat16."""
    return "float32" if backend == "cupy" and options.is_cpu else "bfloat16"


def read_benchmark(finished: Finished) -> TaskOutcome:
    """The outcome from the saved record; rows that were not timed give a reason."""
    if not finished.result.exists():
        return TaskOutcome(FAILED, f"exit code {finished.code}, no record\n{finished.output}")
    return outcome_of_record(json.loads(finished.result.read_text()))


def outcome_of_record(record: JsonObject) -> TaskOutcome:
    """The worst status of the rows, and a line for each."""
    statuses = {row["status"] for row in record["rows"]}
    lines = [f"{row['case']}: {_result_of(row)}" for row in record["rows"]]
    worst = next((s for s in (WRONG, FAILED, UNSUPPORTED) if s in statuses), PASSED)
    return TaskOutcome(worst, "\n".join(lines), {"record": record})


def _result_of(row: JsonObject) -> str:
    if row["reason"]:
        return str(row["reason"])
    parts = []
    if row["seconds"]:
        parts.append(f"{1e3 * row['seconds']['median']:.3f} ms")
    parts += [f"{r['median']:.2f} × {n}" for n, r in row["ratios"].items() if "median" in r]
    if row["peak_bytes"]:
        parts.append(", ".join(f"{b / 2**20:.0f} MiB" for b in row["peak_bytes"]))
    return ", ".join(parts)
