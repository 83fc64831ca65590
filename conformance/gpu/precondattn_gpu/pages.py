"""The documentation's view of saved results: Markdown, and records of benchmarks.

A folder of measurements has one folder for each device, with one file for each stage.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from precondattn_conformance.bench.record import BenchRecord, Row
from precondattn_gpu.profile import FORWARD, farthest
from precondattn_gpu.results import Results, load_folder
from precondattn_gpu.stages import WHAT
from precondattn_gpu.task import PASSED, STATUSES

TIMED_STAGES = ("first_headline", "headline", "memory")
COMPARING = ("roof", "alive", "second", "smoke", "sanitizer", "full")
"""Stages whose tasks are compared with the oracle."""


def devices(measurements: Path) -> dict[str, dict[str, Results]]:
    """The results of each device's folder, by stage."""
    folders = sorted(path for path in measurements.glob("*") if path.is_dir())
    return {folder.name: results for folder in folders if (results := load_folder(folder))}


def records(measurements: Path) -> dict[str, BenchRecord]:
    """The benchmarks of each device and stage, as one record."""
    return {
        f"{folder}_{stage}": merged(results[stage])
        for folder, results in devices(measurements).items()
        for stage in TIMED_STAGES
        if stage in results and any("record" in e["data"] for e in results[stage].tasks.values())
    }


def merged(results: Results) -> BenchRecord:
    """The records of a stage's tasks as one: all rows, and each rate once."""
    saved = [e["data"]["record"] for e in results.tasks.values() if "record" in e["data"]]
    rates = {
        (r["library"], r["device"], r["dtype"]): r for record in saved for r in record["rates"]
    }
    rows = [Row(**row) for record in saved for row in record["rows"]]
    return BenchRecord(saved[0]["date"], saved[0]["machine"], list(rates.values()), rows)


def kernel_seconds(measurements: Path) -> dict[str, dict[str, float]]:
    """Seconds of each kernel's launches by device and name, "triton lucid_solve update 128 8192".

    Launches are counted in a forward call; for a kernel that only the gradient launches, there.
    """
    return {
        results["profile"].machine["device"]: _kernel_seconds(results["profile"])
        for results in devices(measurements).values()
        if "profile" in results
    }


def _kernel_seconds(results: Results) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for entry in sorted(results.tasks.values(), key=lambda entry: entry["data"]["work"] != FORWARD):
        data, of_call = entry["data"], Counter[str]()
        for kernel in data.get("kernels", ()):
            size = f"{data['width']} {data['tokens']}"
            name = f"{data['backend']} {data['mechanism']} {kernel['kernel']} {size}"
            of_call[name] += kernel["seconds"]
        seconds = {**of_call, **seconds}
    return seconds


def ledger(measurements: Path) -> str:
    """Markdown that lists which tasks ran on which device; empty if none did."""
    return "\n".join(
        _device(results) for results in devices(measurements).values() if _is_measured(results)
    )


def _is_measured(results: dict[str, Results]) -> bool:
    return any("device" in each.machine for each in results.values())


def _device(results: dict[str, Results]) -> str:
    machine = next(iter(results.values())).machine
    versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items())
    lines = [
        f"### {machine['device']}\n",
        f"With Python {machine['python']}, {versions}.\n",
        "| stage | what | " + " | ".join(STATUSES) + " |",
        "|---" * (len(STATUSES) + 2) + "|",
    ]
    for name, what in WHAT.items():
        if name in results:
            counts = " | ".join(str(results[name].count(status) or "–") for status in STATUSES)
            lines.append(f"| {name} | {what} | {counts} |")
    if "roof" in results:
        lines += _rates(results["roof"])
    for name in COMPARING:
        if name in results:
            lines += _not_passed(results[name])
    if "alive_bundled" in results:
        lines += _bundled(results["alive_bundled"], results.get("alive"))
    if "first_headline" in results:
        lines += _replays(results["first_headline"])
    if "profile" in results:
        lines += _profile(results["profile"])
    return "\n".join(lines) + "\n"


def _not_passed(results: Results) -> list[str]:
    """A line for each task that did not pass."""
    bad = {name: e for name, e in results.tasks.items() if e["status"] != PASSED}
    if not bad:
        return []
    lines = [f"\nDid not pass in `{results.stage}`:\n"]
    for name, entry in bad.items():
        first = entry["message"].partition("\n")[0].replace("|", "\\|")
        lines.append(f"* `{name}`, {entry['status']}: {first}")
    return lines


def _rates(results: Results) -> list[str]:
    """Markdown lines with the device's measured rates."""
    entry = results.tasks.get("rates", {"status": ""})
    return [f"\nThe device reached {entry['message']}."] if entry["status"] == PASSED else []


def _bundled(results: Results, with_newest: Results | None) -> list[str]:
    """Tasks that failed with Triton's own assembler, and whether that assembler is the cause."""
    newest = {} if with_newest is None else with_newest.tasks
    lines = []
    for name, entry in results.tasks.items():
        if entry["status"] == PASSED:
            continue
        passed = newest.get(name, {}).get("status") == PASSED
        whose = "it passed with the newer assembler" if passed else "so with the newer one"
        first = entry["message"].partition("\n")[0].replace("|", "\\|")
        lines.append(f"* `{name}`, {entry['status']}; {whose}: {first}")
    return ["\nDid not pass with the assembler that Triton brings:\n", *lines] if lines else []


def _replays(results: Results) -> list[str]:
    """Times of calls whose recorded graph is replayed on the device, without Python."""
    rows = [
        f"| `{task}` | `{case}` | {name} | {_replay(seconds)} |"
        for task, entry in results.tasks.items()
        for case, by_name in entry["data"].get("replays", {}).items()
        for name, seconds in by_name.items()
    ]
    if not rows:
        return []
    return [
        "\nReplays of a recorded graph:\n",
        "| call | case | of | time |",
        "|---" * 4 + "|",
        *rows,
    ]


def _replay(seconds: str | dict[str, float]) -> str:
    """A median in milliseconds, or why there is none."""
    if isinstance(seconds, str):
        return seconds.partition("\n")[0].replace("|", "\\|")
    return f"{1e3 * seconds['median']:.3f} ms"


def _profile(results: Results) -> list[str]:
    """Markdown lines on the kernels that lose most time."""
    kernels = [
        {**kernel, "call": name}
        for name, entry in results.tasks.items()
        for kernel in entry["data"].get("kernels", ())
    ]
    lines = [
        "\nThe kernels that are farthest from their roofs:\n",
        "| kernel | of | time | tensor | bandwidth | warps wait for |",
        "|---|---|---|---|---|---|",
    ]
    for kernel in farthest(kernels):
        shares = [_percent(kernel[name]) for name in ("tensor_share", "bandwidth_share")]
        waits = ", ".join(f"{name} {ratio:.2g}" for name, ratio in kernel["stalls"].items())
        time = f"{1e3 * kernel['seconds']:.3f} ms"
        cells = [f"`{kernel['kernel']}`", f"`{kernel['call']}`", time, *shares, waits]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"
