"""A record as figures: ratios to plain attention over the number of tokens, and bars of ratios."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from precondattn.installed import is_installed
from precondattn_conformance.bench.record import BenchRecord, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curves = dict[str, dict[str, list[tuple[int, float]]]]
"""Numbers of tokens and ratios, by work and mechanism (with its library, if there are several)."""


def ratios_to_plain(rows: list[Row]) -> Curves:
    """How many times plain attention's time a row takes, at each number of tokens.

    Plain attention is PyTorch's `scaled_dot_product_attention`, the peer `sdpa`. Where it is a peer
    of the row, the ratio is that of the rounds in turns. Other rows are compared with its time
    beside `softmax`, in the same run at the same sizes.
    """
    plain = {
        (row.work, row.tokens): row.ratios["sdpa"]["seconds"]
        for row in rows
        if row.mechanism == "softmax" and "seconds" in row.ratios.get("sdpa", {})
    }
    several = len({row.library for row in rows}) > 1
    curves: Curves = defaultdict(lambda: defaultdict(list))
    for row in sorted(rows, key=lambda row: row.tokens):
        ratio = row.ratios.get("sdpa", {}).get("median")
        if row.seconds and ratio is None and (row.work, row.tokens) in plain:
            ratio = row.seconds["median"] / plain[row.work, row.tokens]
        if row.seconds and ratio is not None:
            name = f"{row.mechanism} ({row.library})" if several else row.mechanism
            curves[row.work][name].append((row.tokens, ratio))
    return {work: dict(of) for work, of in curves.items()}


def draw(record: BenchRecord, folder: Path) -> list[Path]:
    """Write the figures for which the record has data, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"ratios": ratio_bars, "beside_plain": curves_beside_plain}
    paths = {
        folder / f"{name}.{kind}": of for name, of in figures.items() for kind in ("svg", "png")
    }
    return [path for path, of in paths.items() if draw_one(of, record, path)]


def draw_one(
    figure_of: Callable[[list[Row]], Figure | None], record: BenchRecord, path: Path
) -> bool:
    """Write one figure, such that the same data give the same bytes; False without data."""
    if not is_installed("matplotlib"):
        raise ImportError(
            "figures need matplotlib, which is not installed; install precondattn with its "
            "extra 'bench'"
        )
    import matplotlib

    figure = figure_of(record.rows)
    if figure is None:
        return False
    metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "precondattn", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=110, bbox_inches="tight", metadata=metadata)
    return True


def curves_beside_plain(rows: list[Row]) -> Figure | None:
    """Ratios to plain attention over the number of tokens, a panel for each work; None if none."""
    from matplotlib.figure import Figure

    curves = ratios_to_plain(rows)
    if not curves:
        return None
    figure = Figure(figsize=(4.6 * len(curves) + 1.2, 4.2))
    panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
    for axes, (work, of_work) in zip(panels, curves.items(), strict=True):
        for mechanism, points in of_work.items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=mechanism)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens")
        axes.set_title(work.replace("_", " and "), fontsize=10)
        axes.grid(alpha=0.3, which="both")
        axes.yaxis.set_major_formatter("{x:g}")
    panels[0].set_ylabel("time / plain attention's")
    panels[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def ratio_bars(rows: list[Row]) -> Figure | None:
    """A bar for each ratio to a peer, with its quartiles; None if there are no ratios."""
    from matplotlib.figure import Figure

    bars = [
        (f"{row.case} / {name}", ratio)
        for row in rows
        for name, ratio in row.ratios.items()
        if "median" in ratio
    ]
    if not bars:
        return None
    figure = Figure(figsize=(6.4, 0.9 + 0.3 * len(bars)))
    axes = figure.add_subplot()
    medians, low, high = ([ratio[n] for _, ratio in bars] for n in ("median", "q1", "q3"))
    ranges = [
        [m - q1 for m, q1 in zip(medians, low, strict=True)],
        [q3 - m for m, q3 in zip(medians, high, strict=True)],
    ]
    positions = range(len(bars))
    axes.barh(positions, medians, xerr=ranges, height=0.6, capsize=3, color="#5b8db8")
    axes.set_yticks(positions, [label for label, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="x", which="both", labelsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("time / time of the peer, in the same run")
    axes.grid(axis="x", which="both", alpha=0.3)
    return figure
