"""A record as figures: ratios to plain attention over the number of tokens, and bars of ratios."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from precondattn.installed import is_installed
from precondattn_conformance.bench.beside_plain import ratios_to_plain
from precondattn_conformance.bench.record import BenchRecord, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("svg", "png")


def draw(record: BenchRecord, folder: Path) -> list[Path]:
    """Write the figures for which the record has data, and return their paths.

    Raises
    ------
    ImportError
        if matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"ratios": ratio_bars, "beside_plain": curves_beside_plain}
    paths = {folder / f"{name}.{kind}": of for name, of in figures.items() for kind in FORMATS}
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
            tokens, ratios = zip(*points, strict=True)
            axes.plot(tokens, ratios, marker="o", markersize=4, label=mechanism)
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

    bars = [(row, name, ratio) for row in rows for name, ratio in row.ratios.items()]
    bars = [bar for bar in bars if "median" in bar[2]]
    if not bars:
        return None
    figure = Figure(figsize=(6.4, 0.9 + 0.3 * len(bars)))
    axes = figure.add_subplot()
    medians = [ratio["median"] for _, _, ratio in bars]
    below = [ratio["median"] - ratio["q1"] for _, _, ratio in bars]
    above = [ratio["q3"] - ratio["median"] for _, _, ratio in bars]
    positions = range(len(bars))
    axes.barh(positions, medians, xerr=(below, above), height=0.6, capsize=3, color="#5b8db8")
    axes.set_yticks(positions, [f"{row.case} / {name}" for row, name, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="x", which="both", labelsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("time / time of the peer, in the same run")
    axes.grid(axis="x", which="both", alpha=0.3)
    return figure
