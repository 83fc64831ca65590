"""Does CCQ help any backbone recall?

One block of width 64 with one head is trained on sequences of 32 tokens that hold four pairs of a
key and a value, of 64 each, between tokens of noise, and then ask for the values of all keys. It is
tested on longer sequences with more pairs. λ is learned, as the layer's recipe has it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from make_figures import BLUE, ORANGE, panels
from matplotlib.figure import Figure

from claims import pairs
from claims.claim import Claim, table, with_range
from claims.trainings import SEEDS, trained

CLAIM = Claim(
    says="CCQ helps any linear backbone recall",
    source="CCQ §4.3, Table 3",
    verdict="does not hold",
    because=(
        "With a learned λ, GLA, the gated delta rule and retention recall as much with CCQ as "
        "without: means differ by 2 points at most, in both directions over seeds. GLA with "
        "Hedgehog's features loses 6 to 29 points in every seed. Mamba-2 learned the task in "
        "some seeds only, with and without."
    ),
)
SMALL = {"updates": 2, "seeds": (0,), "batch": 2, "names": ("GLA",), "kept": False}
"""Arguments of `run` for a test."""
ALT = (
    "Recall of five backbones falls with the number of pairs, with CCQ as without. It is lower "
    "with CCQ around GLA with Hedgehog's features, and differs widely between seeds of Mamba-2."
)
BACKBONES = {
    "GLA": "gla",
    "gated delta": "gated_delta",
    "GLA with Hedgehog": "hedgehog(gla)",
    "Mamba-2": "ssd",
    "retention": "retention",
}
TESTS = ((32, 4), (64, 8), (128, 16), (256, 32))
"""The lengths and numbers of pairs in tests."""


def train(name: str, seed: int, updates: int, size: int, shown: bool) -> dict[str, Any]:
    """The recall of each test, and the last loss."""
    model, loss = pairs.model_of(name, seed, updates, size, shown)
    return {"recall": [pairs.recall(model, *test) for test in TESTS], "loss": loss}


def run(
    updates: int = 1500,
    seeds: tuple[int, ...] = SEEDS,
    batch: int = 32,
    names: tuple[str, ...] = tuple(BACKBONES),
    kept: bool = True,
) -> dict[str, Any]:
    """For each backbone, without and with CCQ, and each seed, its recall."""
    jobs = {}
    for seed in seeds:
        for title in names:
            name = BACKBONES[title]
            for key, each in ((title, name), (f"CCQ, {title}", f"ccq({name})")):
                jobs[f"{key}, seed {seed}"] = partial(train, each, seed, updates, batch, kept)
    return {"seeds": list(seeds), "runs": trained("ccq_recall", jobs, kept)}


def recall(found: dict[str, Any], key: str) -> np.ndarray:
    """Recall (seeds, tests)."""
    runs = found["runs"]
    return np.array([runs[f"{key}, seed {seed}"]["recall"] for seed in found["seeds"]])


def titles(found: dict[str, Any]) -> list[str]:
    """The backbones that were trained."""
    return [title for title in BACKBONES if f"{title}, seed {found['seeds'][0]}" in found["runs"]]


def rows(found: dict[str, Any]) -> str:
    """The mean recall without and with CCQ, and the difference of the same seed with its range."""
    cells = []
    for title in titles(found):
        plain, ccq = 100 * recall(found, title), 100 * recall(found, f"CCQ, {title}")
        for i, (length, count) in enumerate(TESTS):
            apart = (ccq - plain)[:, i]
            spread = with_range(apart, "+.0f")
            means = (f"{plain[:, i].mean():.0f} %", f"{ccq[:, i].mean():.0f} %")
            cells.append((title if i == 0 else "", f"{count} of {length} tokens", *means, spread))
    return table(
        ("backbone", "pairs", "without", "with CCQ", "difference in points (range)"), cells
    )


def draw(found: dict[str, Any]) -> Figure:
    """Recall by the number of pairs: the mean, and the range of the seeds."""
    names = titles(found)
    figure, axes = panels(len(names), height=2.4)
    counts = [count for _, count in TESTS]
    for ax, title in zip(axes, names, strict=True):
        for key, label, colour in ((title, "without", BLUE), (f"CCQ, {title}", "CCQ", ORANGE)):
            of = recall(found, key)
            ax.plot(counts, of.mean(0), color=colour, label=label, linewidth=1.4)
            ax.fill_between(counts, of.min(0), of.max(0), color=colour, alpha=0.15, linewidth=0)
        ax.set(title=title.replace(" with ", "\n"), xscale="log", ylim=(-0.02, 1.02))
        ax.set_xticks(counts, [str(x) for x in counts])
        ax.set_xticks([], minor=True)
        if ax is not axes[0]:
            ax.set_yticklabels([])
    axes[0].set_ylabel("recall")
    axes[len(axes) // 2].set_xlabel("pairs")
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=2, loc="outside lower center")
    return figure
