"""Write `performance.md`, and its figures, from the saved runs in `measurements/`.

python docs/make_performance.py

Every number on the page comes from a file that `precondattn bench --save` wrote.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from recorded import DOCS, table, with_measured

from precondattn_conformance.bench.plot import draw_curves, ratios_to_plain
from precondattn_conformance.bench.record import TIMED, BenchRecord, Row, load
from precondattn_conformance.bench.table import duration, size

PAGE, MEASUREMENTS = DOCS / "performance.md", DOCS / "measurements"

CURVES = MEASUREMENTS / "curves"
"""Runs of several mechanisms at many lengths, beside plain attention: a folder for each library."""


def load_records() -> dict[str, BenchRecord]:
    """The saved runs by the names of their files, in order."""
    return {path.stem: load(path) for path in sorted(MEASUREMENTS.glob("*.json"))}


def page(records: dict[str, BenchRecord]) -> str:
    """The page, with its curves and all runs."""
    used = {n: v for r in records.values() for n, v in r.machine.get("versions", {}).items()}
    versions = "Versions: " + ", ".join(f"{name} {v}" for name, v in used.items()) + ".\n\n"
    sections = versions + "\n".join(section(name, record) for name, record in records.items())
    return with_measured(PAGE, launches(), "\n".join(curves()).strip(), sections.strip())


def launches() -> str:
    """Launches and memory on an accelerator, by length and by work."""
    saved = json.loads((MEASUREMENTS / "launches" / "torch.json").read_text(encoding="utf-8"))
    work = ("forward", "with gradient", "forward, 32,768 tokens", "with gradient, 32,768 tokens")
    rows = [(f"`{n}`", *(f"{x:,} ({size(y)})" for x, y in each)) for n, each in saved.items()]
    return table(("8,192 tokens", *work), rows)


def load_curves() -> dict[str, BenchRecord]:
    """One run for each machine and library, joined from runs of some mechanisms and lengths."""
    folders = sorted(path for path in CURVES.glob("*") if path.is_dir())
    return {folder.name: _together(folder) for folder in folders}


def _together(folder: Path) -> BenchRecord:
    runs = [load(path) for path in sorted(folder.glob("*.json"))]
    return replace(runs[0], rows=[row for run in runs for row in run.rows])


def curves() -> list[str]:
    """The time of each mechanism relative to plain attention, at each length."""
    parts = []
    for name, record in load_curves().items():
        parts += [f"### {name}\n", machine(record)]
        figure = f":::{{figure}} measurements/curves/{name}.svg\n:alt: {curves_finding(record)}"
        parts.append(f"{figure}\n:figclass: wide plot\n:::\n")
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


def curves_finding(record: BenchRecord) -> str:
    """Which mechanisms are faster than plain attention at the most tokens, and the slowest."""
    sentences = []
    for work, of_work in ratios_to_plain(record.rows).items():
        most = max(tokens for points in of_work.values() for tokens, _ in points)
        ratios = {n: r for n, points in of_work.items() for tokens, r in points if tokens == most}
        ordered = sorted(ratios, key=lambda name: ratios[name])
        faster = ", ".join(name for name in ordered if ratios[name] < 0.95) or "no mechanism"
        slowest = f"{ordered[-1]}, {ratios[ordered[-1]]:.2f} times its time"
        title = work.replace("_", " and ")
        sentences.append(
            f"Faster than plain attention in the {title} pass of {most:,} tokens: {faster}. "
            f"Slowest: {slowest}."
        )
    return " ".join(sentences)


def lengths(of: Mapping[str, list[tuple[int, float]]], text: str | Callable[[float], str]) -> str:
    """A row for each mechanism, a column for each number of tokens."""
    show = text.format if isinstance(text, str) else text
    columns = sorted({tokens for points in of.values() for tokens, _ in points})
    rows = [
        (f"`{mechanism}`", *(show(found[c]) if c in found else "–" for c in columns))
        for mechanism, found in ((name, dict(points)) for name, points in of.items())
    ]
    return table(("mechanism", *(f"{c:,}" for c in columns)), rows) + "\n"


def section(name: str, record: BenchRecord) -> str:
    """One run: the machine, the times, the peaks of memory, and the cases without a time."""
    parts = [f"## {name}\n", machine(record)]
    timed = [row for row in record.rows if row.seconds]
    peaks = [row for row in record.rows if row.peak_bytes]
    refused = [row for row in record.rows if row.status != TIMED]
    if timed:
        parts.append(times(timed))
    parts += [memory(peaks)] if peaks else []
    return "\n".join([*parts, *([without_time(refused)] if refused else [])])


def machine(record: BenchRecord) -> str:
    """The machine and the date of a run."""
    of = record.machine
    return f"{record.date[:10]}, {of['processor']}, {of['threads']} threads.\n"


def where(row: Row) -> str:
    others = [name for name in dict.fromkeys(row.backends) if name != row.library]
    return f"{row.library} {row.dtype}" + (f" by {', '.join(others)}" if others else "")


def sizes(row: Row) -> str:
    """The sizes, each letter beside its number, but those that follow from others."""
    usual = {"s": "t", "u": "h", "e": "d"}
    of = row.sizes
    shown = {x: n for x, n in of.items() if n != of.get(usual.get(x, ""), 1 if x == "b" else None)}
    return " ".join(f"{letter}{number}" for letter, number in shown.items())


def times(rows: list[Row]) -> str:
    """The time of each case, and its ratios to peers."""
    head = ("case", "what", "time", "our time / peer's time")
    cells = []
    for row in rows:
        ratios = "<br>".join(
            f"{name} {r['median']:.2f} ({r['q1']:.2f}–{r['q3']:.2f})"
            for name, r in row.ratios.items()
        )
        cells.append(
            (
                f"`{row.case}`",
                f"`{row.mechanism}` {row.work}, {sizes(row)}, {where(row)}",
                duration(row.seconds["median"]),
                ratios or "–",
                "–" if row.error is None else f"{row.error:.0e}",
            )
        )
    return table((*head, "error"), cells) + "\n"


def memory(rows: list[Row]) -> str:
    """Peaks, inputs included, and how they grow with the number of tokens."""
    headings = ("case", "what", "tokens", "peak memory", "growth")
    cells = []
    for row in rows:
        cells.append(
            (
                f"`{row.case}`",
                f"`{row.mechanism}` {row.work}, {where(row)}",
                ", ".join(map(str, row.peak_tokens)),
                ", ".join(map(size, row.peak_bytes)),
                ", ".join(f"{factor:.2f} ×" for factor in row.growth) or "–",
            )
        )
    return table(headings, cells) + "\n"


def without_time(rows: list[Row]) -> str:
    """Requested cases without a time."""
    lines = [f"* `{row.case}`, {row.status}: {row.reason.splitlines()[0]}" for row in rows]
    return "These cases have no time:\n\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(load_records()), encoding="utf-8")
    for name, record in load_curves().items():
        draw_curves(record, CURVES / f"{name}.svg")
