"""The style and the common parts of all figures.

Text and lines have mid-tones on a transparent ground, which can be read on light and on dark pages.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

import precondattn as pa

FOLDER = Path(__file__).with_name("figures")
INK = "#808080"
BLUE, ORANGE, GREEN = "#4c8fd6", "#e0802f", "#3fa06a"
STYLE = {
    "svg.hashsalt": "precondattn",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 10,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
    ),
}


def panels(count: int, height: float = 2.1) -> tuple[Figure, list[Axes]]:
    """A figure with `count` axes side by side."""
    figure = Figure(figsize=(5.4, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = [figure.add_subplot(1, count, i + 1) for i in range(count)]
    for ax in axes:
        ax.patch.set_alpha(0)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(name: str, draw: Callable, *arguments, transparent: bool = False) -> None:
    """Draw a figure in this style, and save it in `figures`."""
    with mpl.rc_context(STYLE):
        figure = draw(*arguments)
        figure.savefig(FOLDER / f"{name}.svg", transparent=transparent, metadata={"Date": None})


def legend_below(figure: Figure, ax: Axes, columns: int, **options) -> None:
    """The legend of one of the axes, below all of them."""
    handles = ax.get_legend_handles_labels()
    figure.legend(*handles, ncols=columns, loc="outside lower center", **options)


def ticks(axis: Axis, at, labels=None) -> None:
    """Ticks at these places only."""
    axis.set_ticks(at, [f"{x:,}" for x in at] if labels is None else labels)
    axis.set_ticks([], minor=True)


def band(ax: Axes, x, of_seeds, colour: str, label=None, *, mean=False, alpha=0.15, **line) -> None:
    """The median of the seeds, or the mean, and their range."""
    low, middle, high = np.quantile(of_seeds, (0, 0.5, 1), axis=0)
    ax.plot(x, np.mean(of_seeds, 0) if mean else middle, color=colour, label=label, **line)
    ax.fill_between(x, low, high, color=colour, alpha=alpha, linewidth=0)


def dots(ax: Axes, values, i: int, size: int) -> None:
    """A dot for each seed, and their mean, at the height i."""
    ax.plot(values, [i] * len(values), "o", color=BLUE, markersize=4, alpha=0.7)
    ax.plot(values.mean(), i, "|", color=ORANGE, markersize=size)


def maps(
    titled: dict[str, np.ndarray], signed: bool = False, row: str = "query", column: str = "key"
) -> Figure:
    """Matrices of weights, rows are queries and columns are keys, on one colour scale."""
    figure, axes = panels(len(titled))
    top = max(np.abs(weights).max() for weights in titled.values())
    for ax, (title, weights) in zip(axes, titled.items(), strict=True):
        image = ax.imshow(
            weights,
            cmap="RdBu_r" if signed else "viridis",
            vmin=-top if signed else 0,
            vmax=top,
            interpolation="nearest",
        )
        ax.set(title=title, xlabel=column, xticks=[], yticks=[])
    axes[0].set_ylabel(row)
    bar = figure.colorbar(image, ax=axes, shrink=0.8)
    bar.outline.set_visible(False)
    return figure


def identity(tokens: int) -> np.ndarray:
    """One-hot values (1, s, 1, s): the output is then the matrix of weights."""
    return np.eye(tokens).reshape(1, tokens, 1, tokens)


def weights(attn: pa.Mechanism, q: np.ndarray, k: np.ndarray, **inputs: np.ndarray) -> np.ndarray:
    """The weight of each token's value in each output (t, s)."""
    return pa.diagnostics.weights(attn, q, k, k, **inputs)[0, 0]


def by_row(weights: np.ndarray) -> np.ndarray:
    """Every row divided by its largest entry, to compare late queries with early ones."""
    return weights / np.abs(weights).max(axis=1, keepdims=True)


def clustered(tokens: int, width: int, clusters: int, noise: float, seed: int = 0) -> np.ndarray:
    """Keys (1, s, 1, d) in a few tight clusters."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(clusters, width))
    keys = centres[np.arange(tokens) % clusters] + noise * rng.normal(size=(tokens, width))
    return keys.reshape(1, tokens, 1, width)


def iterates(
    times: Callable[[np.ndarray], np.ndarray], right: np.ndarray, steps: int
) -> Iterator[np.ndarray]:
    """The iterates of conjugate gradients for A x = b, for rows b with a matrix each."""
    x, r = np.zeros_like(right), right
    p = r
    for _ in range(steps):
        image, size = times(p), np.sum(r * r, axis=-1, keepdims=True)
        along = size / np.maximum(np.sum(p * image, axis=-1, keepdims=True), 1e-300)
        x, r = x + along * p, r - along * image
        p = r + np.sum(r * r, axis=-1, keepdims=True) / np.maximum(size, 1e-300) * p
        yield x
