"""A record as a figure: ratios to plain attention over the number of tokens."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

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
    """Write the figure as SVG and PNG if the record has data for it, and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"beside_plain.{kind}" for kind in ("svg", "png")]
    return [path for path in paths if draw_curves(record, path)]


def draw_curves(record: BenchRecord, path: Path) -> bool:
    """Write the figure, such that the same data give the same bytes; False without data."""
    import matplotlib

    figure = curves_beside_plain(record.rows)
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
