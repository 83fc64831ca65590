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

from claims.claim import Claim, table
from claims.needles import layer
from claims.trainings import SEEDS, steps, trained

CLAIM = Claim(
    says="CCQ helps any linear backbone recall",
    source="CCQ, Table 3",
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
ALT = "Recall of backbones with and without CCQ, by the number of pairs."
BACKBONES = {
    "GLA": "gla",
    "gated delta": "gated_delta",
    "GLA with Hedgehog": "hedgehog(gla)",
    "Mamba-2": "ssd",
    "retention": "retention",
}
KEYS, VALUES, NOISE = 64, 64, 16
LENGTH, PAIRS = 32, 4
RATE = 3e-3
TESTS = ((32, 4), (64, 8), (128, 16), (256, 32))
"""Lengths and numbers of pairs that are tested."""


def batch(count: int, length: int, pairs: int) -> tuple[Any, Any]:
    """Tokens (count, length) and the values of all pairs (count, pairs)."""
    import torch

    first = length - pairs
    tokens = KEYS + VALUES + torch.randint(NOISE, (count, length))
    keys = torch.rand(count, KEYS).argsort(1)[:, :pairs]
    values = KEYS + torch.randint(VALUES, (count, pairs))
    places = 2 * torch.rand(count, first // 2).argsort(1)[:, :pairs]
    tokens.scatter_(1, places, keys)
    tokens.scatter_(1, places + 1, values)
    tokens[:, first:] = keys
    return tokens, values


def train(name: str, seed: int, updates: int, size: int, shown: bool) -> dict[str, Any]:
    """The recall of each test, and the last loss."""
    import torch

    from precondattn.layers.torch import Decoder

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Decoder(KEYS + VALUES + NOISE, 64, heads=1, layers=[layer(name, plain_values=False)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=updates)
    for _ in steps(updates, shown):
        tokens, values = batch(size, LENGTH, PAIRS)
        logits = model(tokens)[:, -PAIRS:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), values.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
    recall = []
    for length, pairs in TESTS:
        torch.manual_seed(length)
        with torch.no_grad():
            tokens, values = batch(64, length, pairs)
            found = model(tokens)[:, -pairs:].argmax(-1)
        recall.append(round((found == values).float().mean().item(), 4))
    return {"recall": recall, "loss": round(loss.item(), 4)}


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
        for i, (length, pairs) in enumerate(TESTS):
            apart = (ccq - plain)[:, i]
            spread = f"{apart.mean():+.0f} ({apart.min():+.0f} to {apart.max():+.0f})"
            means = (f"{plain[:, i].mean():.0f} %", f"{ccq[:, i].mean():.0f} %")
            cells.append((title if i == 0 else "", f"{pairs} of {length} tokens", *means, spread))
    return table(
        ("backbone", "pairs", "without", "with CCQ", "difference in points (range)"), cells
    )


def draw(found: dict[str, Any]) -> Figure:
    """Recall by the number of pairs: the mean, and the range of the seeds."""
    names = titles(found)
    figure, axes = panels(len(names), height=2.4)
    pairs = [count for _, count in TESTS]
    for ax, title in zip(axes, names, strict=True):
        for key, label, colour in ((title, "without", BLUE), (f"CCQ, {title}", "CCQ", ORANGE)):
            of = recall(found, key)
            ax.plot(pairs, of.mean(0), color=colour, label=label, linewidth=1.4)
            ax.fill_between(pairs, of.min(0), of.max(0), color=colour, alpha=0.15, linewidth=0)
        ax.set(title=title.replace(" with ", "\n"), xscale="log", ylim=(-0.02, 1.02))
        ax.set_xticks(pairs, [str(x) for x in pairs])
        ax.set_xticks([], minor=True)
        if ax is not axes[0]:
            ax.set_yticklabels([])
    axes[0].set_ylabel("recall")
    axes[len(axes) // 2].set_xlabel("pairs")
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=2, loc="outside lower center")
    return figure
