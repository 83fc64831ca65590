"""Draw the first picture, and write the numbers of the README and of the docs' first page.

python docs/make_front.py

The maps are outputs of `precondattn`; times and counts are from the saved runs in `measurements/`.
Nothing between the marks of these two pages is written by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import matplotlib as mpl
from drawing import BLUE, FOLDER, GREEN, INK, ORANGE, STYLE, by_row, clustered, weights
from make_compositions import ours, refusal
from make_performance import load_curves
from matplotlib.figure import Figure

import precondattn as pa
from precondattn_conformance.bench.plot import ratios_to_plain
from precondattn_conformance.checks import CHECKS

DOCS = Path(__file__).parent
MEASUREMENTS = DOCS / "measurements"
PAGES = {DOCS.parent / "README.md": "docs/", DOCS / "index.md": ""}
"""The pages with the numbers, and how their links to other pages begin."""

BEGIN, END = "<!-- numbers: begin -->", "<!-- numbers: end -->"
KERNELS = ("nvidia", "cuda", "pallas")
"""Reports of compilers: of Triton, of CUDA C++ and of Pallas, for GPUs of NVIDIA."""

CURVES = "cpu_2_cores_torch"
SHIFTS = {"lucid": 4, "path": -4, "gated_delta": 0}
"""How far, in points, a label is above the end of its curve."""
COLOURS = {"lucid": ORANGE, "path": BLUE, "gated_delta": GREEN}


def time_beside_plain() -> dict[str, dict[int, float]]:
    """The forward time of each mechanism over plain attention's, by number of tokens."""
    curves = ratios_to_plain(load_curves()[CURVES].rows)["forward"]
    return {mechanism: dict(points) for mechanism, points in curves.items()}


def picture() -> Figure:
    """Two maps of weights on clustered keys, and times beside plain attention."""
    figure = Figure(figsize=(7.2, 2.5), layout="constrained")
    figure.patch.set_alpha(0)
    softmax, lucid, times = figure.subplots(1, 3, width_ratios=(1, 1, 1.6))
    k = clustered(24, 16, clusters=3, noise=0.4)
    attentions = {"softmax attention": pa.Softmax(), "LUCID": pa.Lucid()}
    for ax, (title, attn) in zip((softmax, lucid), attentions.items(), strict=True):
        ax.imshow(by_row(weights(attn, k, k)), cmap="RdBu_r", vmin=-1, vmax=1)
        ax.set(title=title, xlabel="token that is read", xticks=[], yticks=[])
    softmax.set_ylabel("query")
    times.axhline(1, color=INK, linewidth=1)
    for mechanism, colour in COLOURS.items():
        points = time_beside_plain()[mechanism]
        times.plot([*points], [*points.values()], color=colour, marker="o", markersize=3)
        last = max(points)
        times.annotate(
            mechanism, (last, points[last]), (8, SHIFTS[mechanism]),
            textcoords="offset points", va="center", color=colour,
        )  # fmt: skip
    times.text(1_150_000, 0.9, "plain attention", color=INK, fontsize=8, ha="right", va="top")
    times.set(
        title="time, plain attention = 1 (CPU)", xlabel="tokens", xscale="log", yscale="log",
        xlim=(400, 1_200_000), xticks=[512, 2048, 8192, 32768],
        xticklabels=["512", "2k", "8k", "32k"],
        yticks=[0.03, 0.1, 0.3, 1, 3, 10], yticklabels=["0.03", "0.1", "0.3", "1", "3", "10"],
    )  # fmt: skip
    times.minorticks_off()
    times.spines[["top", "right"]].set_visible(False)
    times.patch.set_alpha(0)
    return figure


def compositions() -> int:
    """How many pairs of a preconditioner and a mechanism compose."""
    known = ours()
    outer = [cls for cls in known.values() if cls.role == "preconditioner"]
    return sum(refusal(cls, inner) is None for cls in outer for inner in known)


def compiled() -> int:
    """How many variants of kernels have been compiled for a GPU that is not there."""
    saved = MEASUREMENTS / "kernels"
    reports = [json.loads((saved / f"{name}.json").read_text()) for name in KERNELS]
    return sum(len({each["name"] for each in report["variants"]}) for report in reports)


def numbers(to: str) -> str:
    """The list of numbers, with links that begin with `to`."""
    known = ours()
    bases = sum(cls.role == "base" for cls in known.values())
    ecosystem = json.loads((MEASUREMENTS / "ecosystem" / "smoke.json").read_text("utf-8"))
    times = time_beside_plain()
    forwards = ", ".join(f"`{each}` {times[each][8192]:.2g}" for each in COLOURS)
    has_run = any((MEASUREMENTS / "gpu").glob("*.json"))
    ran = "Some have run on a GPU" if has_run else "**None has run on a GPU**, and neither has CuPy"
    return "\n".join(
        (
            f"- **{len(known)} mechanisms × 5 array libraries**: {bases} bases, which compute"
            f" attention by themselves, and {len(known) - bases} preconditioners, which wrap"
            f" another mechanism ([{compositions()} pairs]({to}compositions.md) are possible), on"
            " NumPy, PyTorch, JAX, CuPy and array-api-strict.",
            f"- **{len(CHECKS)} kinds of checks** for any implementation of a mechanism, applied to"
            f" our own backends and to [public functions]({to}ecosystem.md) of other libraries:"
            f" {len(ecosystem['rows'])} implementations in all.",
            f"- **Time on a CPU**, as a multiple of PyTorch's plain attention at 8,192 tokens:"
            f" {forwards} ([all measurements]({to}performance.md)).",
            f"- **GPU**: {compiled():,} variants of kernels compile. {ran}"
            f" ([ledger]({to}kernel_ledger.md)).",
        )
    )


def written(page: Path) -> str:
    """The text of a page, with its numbers."""
    block = f"{BEGIN}\n{numbers(PAGES[page])}\n{END}"
    text = page.read_text(encoding="utf-8")
    return re.sub(f"{BEGIN}.*?{END}", lambda _: block, text, flags=re.DOTALL)


if __name__ == "__main__":
    with mpl.rc_context(STYLE):
        picture().savefig(FOLDER / "front.svg", transparent=True, metadata={"Date": None})
    for each in PAGES:
        each.write_text(written(each), encoding="utf-8")
