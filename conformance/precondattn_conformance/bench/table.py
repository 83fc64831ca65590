"""A record in the terminal: a row for each case, and the reasons of cases without a time."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from precondattn_conformance.bench.compare import IMPROVED, REGRESSED, UNCOMPARED, Change
from precondattn_conformance.bench.record import TIMED, WRONG, BenchRecord, Row


def print_record(record: BenchRecord, console: Console) -> None:
    """Print times, ratios, rates and errors; then peaks; then what was not measured, and why."""
    table = Table(title="median times, with quartiles", title_justify="left", show_lines=True)
    table.add_column("case", overflow="fold")
    table.add_column("by", overflow="fold")
    for heading in ("error", "time", "time / peer's", "FLOP/s, bytes/s", "peak", "first call"):
        table.add_column(heading, justify="right", no_wrap=True)
    peaks = Table("case", "by", title="peak memory, inputs included", title_justify="left")
    for heading in ("tokens", "peak", "growth"):
        peaks.add_column(heading, justify="right")
    for row in record.rows:
        if row.seconds:
            table.add_row(*_times(row))
        if len(row.peak_bytes) > 1 or (row.peak_bytes and not row.seconds):
            growth = " ".join(f"{factor:.2f}" for factor in row.growth) or "–"
            tokens, sizes = " ".join(map(str, row.peak_tokens)), " ".join(map(size, row.peak_bytes))
            peaks.add_row(escape(row.case), _backends(row), tokens, sizes, growth)
    for each in (table, peaks):
        if each.row_count:
            console.print(each)
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


def changes_table(changed: list[Change]) -> Table:
    """The changes of rows: ratios and time before and now, and the verdict."""
    table = Table(title="changes", title_justify="left")
    table.add_column("case", overflow="fold")
    table.add_column("time / peer's, before → now")
    table.add_column("verdict")
    table.add_column("time, now / before", justify="right")
    table.add_column("what changed", overflow="fold")
    colours = {REGRESSED: "red", IMPROVED: "green", UNCOMPARED: "yellow"}
    for change in changed:
        ratios = [f"{peer} {then:.2f} → {now:.2f}" for peer, then, now in change.ratios]
        table.add_row(
            escape(change.name),
            escape("\n".join(ratios)) or "–",
            f"[{colours.get(change.verdict, 'default')}]{change.verdict}[/]",
            "–" if change.time is None else f"{change.time:.2f}",
            escape(change.text),
        )
    return table


def _times(row: Row) -> tuple[str, ...]:
    median, q1, q3 = (row.seconds[name] for name in ("median", "q1", "q3"))
    ratios = [
        f"{escape(name)} {r['median']:.2f}\n({r['q1']:.2f}–{r['q3']:.2f})"
        for name, r in row.ratios.items()
    ]
    rates = rate(row.flops, median, row.gemm_share), rate(row.bytes, median, row.copy_share)
    return (
        escape(f"{row.case} t={row.tokens}"),
        _backends(row),
        f"{row.error:.0e}",
        f"{duration(median)}\n{duration(q1)}–{duration(q3)}",
        "\n".join(ratios) or "–",
        "\n".join(rates),
        size(row.peak_bytes[0]) if row.peak_bytes else "–",
        duration(row.first_call_seconds or 0.0),
    )


def _backends(row: Row) -> str:
    return escape(", ".join(dict.fromkeys(row.backends)))


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
