"""Do the keys of needles lie off the directions in which keys vary most?

Small models are trained to recall pairs (`pairs.py`). Then, in 256 tokens with four pairs and noise
else, the alignment of each key is the share of its centred energy in the top 16 of the 64
eigenvectors of all keys, and the gap is that of the pairs' keys less that of noise.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from make_figures import BLUE, ORANGE, panels
from matplotlib.figure import Figure

import precondattn as pa
from claims import needles, pairs
from claims.claim import Claim, table, with_range
from claims.trainings import SEEDS, trained

CLAIM = Claim(
    says="Keys of needles lie off the directions in which keys vary most",
    source="CCQ §3.3, Figures 1 and 2; CCQ Appendix H, text",
    verdict="does not hold",
    because=(
        "Before training the keys of needles are off the top 16 directions, by 0.13. After it they "
        "lie on them more than noise does, by 0.06 to 0.13 on average and in every seed, with and "
        "without CCQ: a model that has to tell needles apart makes their keys vary."
    ),
)
SMALL = {"updates": 2, "seeds": (0,), "batch": 2, "names": ("GLA",), "kept": False}
"""Arguments of `run` for a test."""
ALT = (
    "In each of four trained models and in every seed, the needles' keys have a larger share of "
    "their energy in the top 16 directions than the noise's keys."
)
MECHANISMS = {
    "softmax": "softmax",
    "GLA": "gla",
    "GLA with CCQ": "ccq(gla)",
    "gated delta": "gated_delta",
}
RANK, LENGTH = 16, 256


def train(name: str, seed: int, updates: int, size: int, shown: bool) -> dict[str, Any]:
    """The mean alignment of keys of pairs and of noise, before and after training; the recall."""
    found = {}
    model = pairs.decoder(name, seed)
    found["before"] = alignments(model)
    model, _ = pairs.model_of(name, seed, updates, size, shown)
    found["after"] = alignments(model)
    return {**found, "recall": pairs.recall(model, LENGTH, pairs.PAIRS)}


def alignments(model: Any) -> list[float]:
    """The mean alignments of the keys at the pairs' values, which hold key and value, and of
    noise."""
    import torch

    torch.manual_seed(0)
    tokens, _, places = pairs.batch(32, LENGTH, pairs.PAIRS)
    share = pa.alignment(needles.inputs_of(model, tokens)["k"], RANK)[:, :, 0]
    is_noise = tokens >= pairs.KEYS + pairs.VALUES
    means = share.gather(1, places).nanmean(), share[is_noise].nanmean()
    return [round(float(mean), 4) for mean in means]


def run(
    updates: int = 1000,
    seeds: tuple[int, ...] = SEEDS,
    batch: int = 32,
    names: tuple[str, ...] = tuple(MECHANISMS),
    kept: bool = True,
) -> dict[str, Any]:
    """For each mechanism and seed, the alignments."""
    jobs = {
        f"{title}, seed {seed}": partial(train, MECHANISMS[title], seed, updates, batch, kept)
        for seed in seeds
        for title in names
    }
    runs = trained("ccq_alignment", jobs, kept)
    return {"seeds": list(seeds), "names": list(names), "runs": runs}


def of(found: dict[str, Any], title: str, when: str) -> np.ndarray:
    """Alignments (seeds, needles and noise)."""
    runs = found["runs"]
    return np.array([runs[f"{title}, seed {seed}"][when] for seed in found["seeds"]])


def rows(found: dict[str, Any]) -> str:
    """Mean alignments, and the gap with its range over seeds."""
    cells = []
    for title in found["names"]:
        for when in ("before", "after"):
            needle, noise = of(found, title, when).T
            gap = needle - noise
            spread = with_range(gap, "+.2f")
            means = (f"{needle.mean():.2f}", f"{noise.mean():.2f}")
            cells.append((title if when == "before" else "", f"{when} training", *means, spread))
    head = ("model", "", "alignment of needles", "of noise", "gap (range of seeds)")
    return table(head, cells)


def draw(found: dict[str, Any]) -> Figure:
    """Alignments after training, one point a seed."""
    figure, (ax,) = panels(1, height=2.4)
    for i, title in enumerate(found["names"]):
        needle, noise = of(found, title, "after").T
        for values, colour, label in ((needle, ORANGE, "needles"), (noise, BLUE, "noise")):
            label = label if i == 0 else None
            ax.plot(values, [i] * len(values), "o", color=colour, alpha=0.7, label=label)
    ax.set(yticks=range(len(found["names"])), yticklabels=found["names"], xlim=(0, 1.02))
    ax.set_xlabel("share of the energy in the top 16 of 64 directions")
    ax.invert_yaxis()
    figure.legend(*ax.get_legend_handles_labels(), ncols=2, loc="outside lower center")
    return figure
