"""Write `performance.md`, and its figures, from the saved runs in `measurements/`.

python docs/make_performance.py

Every number on the page comes from a file that `precondattn bench --save` wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from precondattn_conformance.bench.plot import draw_curves, ratios_to_plain
from precondattn_conformance.bench.record import TIMED, BenchRecord, Row, load
from precondattn_conformance.bench.table import duration, size

PAGE = Path(__file__).with_name("performance.md")
MEASUREMENTS = Path(__file__).with_name("measurements")

HEAD = """\
# Performance

`docs/make_performance.py` generates this page from saved runs of `precondattn bench`. The page
[Benchmarks](benchmarks.md) explains how the times are measured.

"""

NOTHING = "Nothing has been measured yet: there is no file in `docs/measurements`.\n"

ABOUT = """\
Times are medians of several rounds. A *ratio* is our time divided by the time of a peer, such as
PyTorch's attention; below 1, we are faster. The two ran alternately, and the page gives the median
and the quartiles of the ratios of neighbouring runs. The *error* of the output, and of the
gradients if there is a backward pass, is relative to the oracle in float64. The columns *of GEMM*
and *of copy* compare the rate of computing and of moving data with the rate that the same machine
reached in one large matrix product and in one large copy.
"""

ABOUT_CURVES = """\
The tables give the time of each mechanism divided by the time of plain attention, for several
numbers of tokens. Plain attention is PyTorch's `scaled_dot_product_attention`, with the same
queries, keys and values in the same run. At 1, a mechanism costs as much as plain attention. The
cost per token of a recurrence does not grow, so its ratio falls below 1 for long sequences.
"""

CURVES = MEASUREMENTS / "curves"
"""Runs of several mechanisms at many lengths, beside plain attention: a folder for each library."""


def load_records() -> dict[str, BenchRecord]:
    """The saved runs by the names of their files, in order."""
    return {path.stem: load(path) for path in sorted(MEASUREMENTS.glob("*.json"))}


def page(records: dict[str, BenchRecord]) -> str:
    """The page, as Markdown."""
    if not records:
        return HEAD + NOTHING
    sections = [section(name, record) for name, record in records.items()]
    return HEAD + ABOUT + "\n" + "\n".join([*curves(), *sections])


def load_curves() -> dict[str, BenchRecord]:
    """One run for each machine and library, joined from runs of some mechanisms and lengths."""
    folders = sorted(path for path in CURVES.glob("*") if path.is_dir())
    return {folder.name: _together(folder) for folder in folders}


def _together(folder: Path) -> BenchRecord:
    runs = [load(path) for path in sorted(folder.glob("*.json"))]
    return replace(runs[0], rows=[row for run in runs for row in run.rows])


def curves() -> list[str]:
    """The time of each mechanism relative to plain attention, at each length."""
    parts = ["## How much slower than plain attention\n", ABOUT_CURVES] if load_curves() else []
    for name, record in load_curves().items():
        parts += [f"### {name}\n", machine(record)]
        shape = "Lines of time over plain attention's against tokens, both logarithmic."
        parts.append(plot(f"measurements/curves/{name}.svg", shape, curves_finding(record)))
        for work, of_work in ratios_to_plain(record.rows).items():
            title = work.replace("_", " and ").capitalize()
            parts += [f"{title} pass, time / time of plain attention:\n"]
            parts += [lengths(of_work, "{:.2f}")]
        peaks: dict[str, list[tuple[int, float]]] = {}
        for row in sorted(record.rows, key=lambda row: row.tokens):
            if row.peak_bytes and row.work == "forward_backward":
                peaks.setdefault(row.mechanism, []).append((row.tokens, row.peak_bytes[0]))
        if peaks:
            parts += ["Peak memory of the forward and backward pass, including inputs:\n"]
            parts += [lengths(peaks, size)]
        refused = [replace(row, case=row.name) for row in record.rows if row.status != TIMED]
        if refused:
            parts.append(without_time(refused))
    return parts


def plot(path: str, shape: str, finding: str) -> str:
    """A figure with its finding as the caption; the alternative text also says what is drawn."""
    alternative = f"{shape} {finding}".replace("`", "")
    return f":::{{figure}} {path}\n:alt: {alternative}\n:figclass: wide plot\n\n{finding}\n:::\n"


FASTER = 0.95
"""The ratio of times below which a caption says that a mechanism takes less time."""


def curves_finding(record: BenchRecord) -> str:
    """Which mechanisms are faster than plain attention at the most tokens, and the slowest."""
    sentences = []
    for work, of_work in ratios_to_plain(record.rows).items():
        most = max(tokens for points in of_work.values() for tokens, _ in points)
        ratios = {n: r for n, points in of_work.items() for tokens, r in points if tokens == most}
        ordered = sorted(ratios, key=lambda name: ratios[name])
        faster = [f"`{name}`" for name in ordered if ratios[name] < FASTER]
        listed = ""
        if faster:
            names = " and ".join(filter(None, (", ".join(faster[:-1]), faster[-1])))
            verb = "takes" if len(faster) == 1 else "take"
            listed = f"{names} {verb} less time than plain attention"
        slowest = ordered[-1]
        dearest = f"`{slowest}` takes the most, {ratios[slowest]:.2f} times its time"
        title = work.replace("_", " and ").capitalize()
        sentences.append(
            f"{title} of {most:,} tokens: {'; '.join(filter(None, (listed, dearest)))}."
        )
    return " ".join(sentences)


def ratios_finding(rows: list[Row]) -> str:
    """How many ratios are below 1, and the smallest and the largest."""
    found = sorted(
        (ratio["median"], row.case, peer) for row in rows for peer, ratio in row.ratios.items()
    )
    texts = [f"`{case}` over {peer}, {ratio:.2f}" for ratio, case, peer in found]
    if len(texts) == 1:
        return f"One ratio: {texts[0]}."
    below = sum(ratio < 1 for ratio, _, _ in found)
    return (
        f"Below 1, where we are faster: {below} of {len(found)} ratios. "
        f"Smallest: {texts[0]}. Largest: {texts[-1]}."
    )


def lengths(of: Mapping[str, list[tuple[int, float]]], text: str | Callable[[float], str]) -> str:
    """A row for each mechanism, a column for each number of tokens."""
    show = text.format if isinstance(text, str) else text
    columns = sorted({tokens for points in of.values() for tokens, _ in points})
    rows = [
        (f"`{mechanism}`", *(show(found[c]) if c in found else "–" for c in columns))
        for mechanism, found in ((name, dict(points)) for name, points in of.items())
    ]
    return table(("mechanism", *(f"{c:,}" for c in columns)), rows)


def section(name: str, record: BenchRecord) -> str:
    """One run: the machine, the times, the peaks of memory, and the cases without a time."""
    parts = [f"## {name}\n", machine(record)]
    timed = [row for row in record.rows if row.seconds]
    peaks = [row for row in record.rows if row.peak_bytes]
    refused = [row for row in record.rows if row.status != TIMED]
    if timed:
        parts.append(times(timed))
    if any(row.ratios for row in timed):
        parts.append(ratios_finding(timed) + "\n")
    if peaks:
        parts.append(memory(peaks))
    if refused:
        parts.append(without_time(refused))
    return "\n".join(parts)


def machine(record: BenchRecord) -> str:
    """The machine, the date and the versions of a run."""
    computer = record.machine
    versions = ", ".join(f"{n} {v}" for n, v in computer.get("versions", {}).items())
    lines = [
        f"Measured {record.date[:10]} on {computer.get('processor')}, {computer.get('cores')} "
        f"cores, {computer.get('threads')} threads{_neighbours(computer)}, with {versions}.",
    ]
    for rate in record.rates:
        lines.append(
            f"{rate['library']} on {rate['device']} in {rate['dtype']} itself: "
            f"{rate['flops_per_second'] / 1e9:.3g} GFLOP/s in a matrix product, "
            f"{rate['bytes_per_second'] / 1e9:.3g} GB/s in a copy."
        )
    return "\n".join(lines) + "\n"


def _neighbours(computer: dict[str, Any]) -> str:
    count = computer.get("neighbours", 0)
    return f", beside {count} other busy process{'es' if count > 1 else ''}" if count else ""


def sizes(row: Row) -> str:
    """The sizes, each letter beside its number."""
    return " ".join(f"{letter}{number}" for letter, number in row.sizes.items())


def table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table, as Markdown."""
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    lines += [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join(lines) + "\n"


def times(rows: list[Row]) -> str:
    """The time of each case, and its ratios to peers."""
    headings = (
        "case",
        "what",
        "backend",
        "time",
        "our time / peer's time",
        "of GEMM",
        "of copy",
        "error",
    )
    cells = []
    for row in rows:
        ratios = "<br>".join(
            f"{name} {r['median']:.2f} ({r['q1']:.2f}–{r['q3']:.2f})"
            for name, r in row.ratios.items()
        )
        cells.append(
            (
                f"`{row.case}`",
                f"`{row.mechanism}` {row.work}, {sizes(row)}, {row.library} {row.dtype}",
                ", ".join(dict.fromkeys(row.backends)),
                duration(row.seconds["median"]),
                ratios or "–",
                share(row.gemm_share),
                share(row.copy_share),
                "–" if row.error is None else f"{row.error:.0e}",
            )
        )
    return table(headings, cells)


def share(of: float | None) -> str:
    return "–" if of is None else f"{100 * of:.0f} %"


def memory(rows: list[Row]) -> str:
    """Peaks, inputs included, and how they grow with the number of tokens."""
    headings = ("case", "what", "backend", "tokens", "peak memory", "growth")
    cells = []
    for row in rows:
        cells.append(
            (
                f"`{row.case}`",
                f"`{row.mechanism}` {row.work}, {row.library} {row.dtype}",
                ", ".join(dict.fromkeys(row.backends)),
                ", ".join(map(str, row.peak_tokens)),
                ", ".join(map(size, row.peak_bytes)),
                ", ".join(f"{factor:.2f} ×" for factor in row.growth) or "–",
            )
        )
    return table(headings, cells)


def without_time(rows: list[Row]) -> str:
    """Requested cases without a time."""
    lines = [f"* `{row.case}`, {row.status}: {row.reason.splitlines()[0]}" for row in rows]
    return "These cases have no time:\n\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(load_records()), encoding="utf-8")
    for name, record in load_curves().items():
        draw_curves(record, CURVES / f"{name}.svg")
