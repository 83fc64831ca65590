"""Does differential attention put less weight on noise than softmax, once both are trained?

Both are trained as in `lucid_needles.py`: one block of width 32 with four heads (differential
attention: four pairs of half the width), 128 tokens with 16 needles. Then, in sequences of up to
1,024 tokens with as many needles, the experiment measures where the weights of the queries lie.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from make_figures import BLUE, GREEN, INK, panels
from matplotlib.figure import Figure

from claims import needles
from claims.claim import Claim, table, with_range
from claims.trainings import SEEDS, trained

CLAIM = Claim(
    says="Differential attention cancels noise: it puts more weight on the answer than softmax",
    source="Differential Transformer §1, Figure 1",
    verdict="does not hold",
    because=(
        "At equal width and parameters, softmax puts 97 % of the weights of its best head on the "
        "answer and none on noise, also in sequences eight times as long. Differential attention, "
        "whose two maps have half the width each, puts 48 % there, and on noise 5 % of the "
        "absolute weights, which grows to 27 %."
    ),
)
SMALL = {"updates": 2, "seeds": (0,), "batch": 2, "lengths": (128,), "kept": False}
"""Arguments of `run` for a test."""
ALT = (
    "Softmax has 97 % of the weights on the answer at every length. Differential attention has 48 "
    "% there, and its share on noise grows from 5 to 27 % with the length."
)
MECHANISMS = {"softmax": "softmax", "differential": "differential"}
LENGTHS = (128, 256, 512, 1024)
PLACES = {"answer": GREEN, "needles": BLUE, "noise": INK}


def train(
    name: str, seed: int, updates: int, size: int, lengths: tuple[int, ...], shown: bool
) -> dict[str, Any]:
    """The shares and the recall at each length."""
    arguments = needles.layer(name)
    model, _ = needles.train(arguments, seed, updates, size, shown, width=32)
    return {
        "shares": [needles.shares(model, length) for length in lengths],
        "recall": [needles.accuracy(model, length, needles.NEEDLES) for length in lengths],
    }


def run(
    updates: int = 1200,
    seeds: tuple[int, ...] = SEEDS,
    batch: int = 16,
    lengths: tuple[int, ...] = LENGTHS,
    kept: bool = True,
) -> dict[str, Any]:
    """For each mechanism and seed, shares and recall."""
    jobs = {
        f"{title}, seed {seed}": partial(train, name, seed, updates, batch, lengths, kept)
        for seed in seeds
        for title, name in MECHANISMS.items()
    }
    runs = trained("differential_noise", jobs, kept)
    return {"seeds": list(seeds), "lengths": list(lengths), "runs": runs}


def shares(found: dict[str, Any], title: str, place: str) -> np.ndarray:
    """Shares (seeds, lengths)."""
    runs = (found["runs"][f"{title}, seed {seed}"] for seed in found["seeds"])
    return np.array([[of[place] for of in run["shares"]] for run in runs])


def rows(found: dict[str, Any]) -> str:
    """Medians over seeds, with the range, of each place; and recall."""
    cells = []
    for i, length in enumerate(found["lengths"]):
        for title in MECHANISMS:
            shown = []
            for place in PLACES:
                of = 100 * shares(found, title, place)[:, i]
                shown.append(with_range(of, ".1f", unit=" %", middle=np.median(of)))
            runs = (found["runs"][f"{title}, seed {seed}"] for seed in found["seeds"])
            recall = 100 * np.median([run["recall"][i] for run in runs])
            cells.append((f"{length} tokens", title, *shown, f"{recall:.0f} %"))
    head = ("", "mechanism", "weight on the answer", "on other needles", "on noise", "recall")
    return table(head, cells)


def draw(found: dict[str, Any]) -> Figure:
    """Shares by length: medians, and the range of the seeds."""
    figure, axes = panels(2, height=2.9)
    for ax, title in zip(axes, MECHANISMS, strict=True):
        for place, colour in PLACES.items():
            low, middle, high = np.quantile(shares(found, title, place), (0, 0.5, 1), axis=0)
            ax.plot(found["lengths"], middle, "o-", color=colour, label=place, markersize=4)
            ax.fill_between(found["lengths"], low, high, color=colour, alpha=0.15, linewidth=0)
        ax.set(title=title, xlabel="tokens", xscale="log", ylim=(-0.02, 1.02))
        ax.set_xticks(found["lengths"], [f"{x:,}" for x in found["lengths"]], minor=False)
        ax.set_xticks([], minor=True)
    axes[0].set_ylabel("share of the weights")
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=3, loc="outside lower center")
    return figure
