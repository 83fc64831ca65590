"""A record in the terminal: a row for each case, and the reasons of cases without a time."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from precondattn_conformance.bench.record import TIMED, WRONG, BenchRecord, Row


def print_record(record: BenchRecord, console: Console) -> None:
    """Print times, ratios, rates and errors; then peaks; then what was not measured, and why."""
    timed = [row for row in record.rows if row.seconds]
    if timed:
        console.print(_times(timed))
    peaks = [row for row in record.rows if len(row.peak_bytes) > 1 or not row.seconds]
    if any(row.peak_bytes for row in peaks):
        console.print(_peaks([row for row in peaks if row.peak_bytes]))
    for row in record.rows:
        if row.status != TIMED:
            colour = "red" if row.status != "unsupported" else "yellow"
            console.print(f"[{colour}]{row.status}[/] {escape(row.name)}", soft_wrap=True)
            console.print(f"  {escape(row.reason)}", soft_wrap=True)
            if row.status == WRONG:
                console.print("  a wrong result is not timed", soft_wrap=True)
    absent = {(name, why) for row in record.rows for name, why in row.absent_peers.items()}
    for name, why in sorted(absent):
        console.print(f"no ratio to {escape(name)}: {escape(why)}", soft_wrap=True)


def _times(rows: list[Row]) -> Table:
    table = Table(title="median times, with quartiles", title_justify="left", show_lines=True)
    table.add_column("case", overflow="fold")
    table.add_column("by", overflow="fold")
    for heading in ("error", "time", "time / peer's", "FLOP/s, bytes/s", "peak", "first call"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        seconds = row.seconds
        ratios = [
            f"{escape(name)} {r['median']:.2f}\n({r['q1']:.2f}–{r['q3']:.2f})"
            for name, r in row.ratios.items()
        ]
        rates = (
            rate(row.flops, seconds["median"], row.gemm_share),
            rate(row.bytes, seconds["median"], row.copy_share),
        )
        table.add_row(
            escape(f"{row.case} t={row.sizes.get('t', row.sizes.get('s'))}"),
            escape(", ".join(dict.fromkeys(row.backends))),
            f"{row.error:.0e}",
            f"{duration(seconds['median'])}\n{duration(seconds['q1'])}–{duration(seconds['q3'])}",
            "\n".join(ratios) or "–",
            "\n".join(rates),
            size(row.peak_bytes[0]) if row.peak_bytes else "–",
            duration(row.first_call_seconds or 0.0),
        )
    return table


def _peaks(rows: list[Row]) -> Table:
    table = Table(title="peak memory, inputs included", title_justify="left")
    table.add_column("case")
    table.add_column("by")
    for heading in ("tokens", "peak", "growth"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            escape(row.case),
            escape(", ".join(dict.fromkeys(row.backends))),
            " ".join(map(str, row.peak_tokens)),
            " ".join(map(size, row.peak_bytes)),
            " ".join(f"{factor:.2f}" for factor in row.growth) or "–",
        )
    return table


def duration(seconds: float) -> str:
    """A duration with three digits and a unit."""
    for unit, length in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def size(count: float) -> str:
    """A number of bytes, in a suitable unit."""
    for unit, length in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= length:
            return f"{count / length:.3g} {unit}"
    return f"{count:.0f} B"


def rate(count: float | None, seconds: float, share: float | None) -> str:
    """A rate per second, and its share of the machine's own rate."""
    if count is None or share is None:
        return "–"
    return f"{count / seconds / 1e9:.3g} G ({100 * share:.0f} %)"
