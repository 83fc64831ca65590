"""CCQ in language modelling beyond the trained length, and where the backbone forgets.

Decoders of two blocks of width 64 with two heads are trained on windows of 64 characters of the
text of `train_a_language_model.md`, and tested on 64 windows of 1,024 held-out characters that do
not overlap. The loss is that of characters by their position in the window.

Backbones that forget have the published gate and another e^{−1/4} at each token, so that they
remember 4 tokens at most. There CCQ is tried also with `covariance=decayed`, whose weights decay as
the state does. All models of a backbone start from the same weights and see the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from make_figures import GREEN, INK, ORANGE, panels
from matplotlib.figure import Figure

from claims.claim import Claim, table, with_range
from claims.needles import inputs_of
from claims.trainings import SEEDS, fit, trained
from claims.tutorial import tutorial
from precondattn.layers.recipes.gates import DecayWithBias

CLAIM = Claim(
    says="CCQ lowers the loss of linear backbones, the more the longer the context",
    source="CCQ §4.2, Table 2; CCQ §4.4, Figures 3 and 4; CCQ Appendix I, text",
    verdict="does not hold",
    because=(
        "With CCQ the mean loss changes by −0.011 to +0.007 nats, less than what seeds differ by "
        "and in both directions, and by as much at sixteen times the trained length as within it. "
        "Around gated DeltaNet the covariance that decays with the backbone has mean losses 0.007 "
        "to 0.017 lower than the paper's, no more so where the backbone is made to forget, and in "
        "some seeds they are higher."
    ),
)
SMALL = {"updates": 1, "seeds": (0,), "names": ("GLA",), "windows": 1, "kept": False}
"""Arguments of `run` for a test."""
ALT = (
    "Change of the loss by CCQ at five positions, for five pairs of a backbone and a covariance. "
    "The means stay near 0 at every position, and seeds lie on both sides of it."
)
LENGTH, COUNT, RATE = 64, 16, 3e-3
"""Characters of a window, windows of a batch, and the learning rate of the training."""
EDGES = (0, 64, 128, 256, 512, 1024)
"""Bounds of the windows of positions whose losses are averaged; the first window is trained."""
MEMORY = 4
"""The most tokens that a backbone with strong forgetting remembers."""


@dataclass(frozen=True)
class Forgetful(DecayWithBias):
    """The published log decay, less 1/4."""

    def make(self, tokens: Any, p: Any) -> Any:
        return super().make(tokens, p) - 1 / MEMORY


class Backbone(NamedTuple):
    """A backbone and the covariances that are tried around it."""

    mechanism: str
    recipes: dict[str, Any]
    covariances: tuple[str, ...]


DELTA = "gated_delta"
BACKBONES = {
    "GLA": Backbone("gla", {}, ("running",)),
    "gated delta": Backbone(DELTA, {}, ("running", "decayed")),
    "gated delta that forgets": Backbone(DELTA, {"g": Forgetful()}, ("running", "decayed")),
}
COLOURS = {"running": ORANGE, "decayed": GREEN}


def train(
    title: str, covariance: str, seed: int, updates: int, windows: int, shown: bool
) -> dict[str, Any]:
    """The losses by position, and means of λ and of the decay in the first block."""
    import torch

    from precondattn.layers.torch import Decoder

    torch.set_num_threads(1)
    page, backbone = tutorial(), BACKBONES[title]
    generator = torch.Generator().manual_seed(1 + seed)

    def decoder(mechanism: str) -> Any:
        layer = {"mechanism": mechanism, "recipes": backbone.recipes}
        return Decoder(len(page["alphabet"]), 64, heads=2, layers=[layer] * 2)

    torch.manual_seed(seed)
    model = decoder(backbone.mechanism)
    if covariance != "none":
        plain = model.state_dict()
        model = decoder(f"ccq[covariance={covariance}]({backbone.mechanism})")
        # The order in which weights are drawn depends on the mechanism.
        model.load_state_dict({**model.state_dict(), **plain})

    def loss_of() -> Any:
        return page["loss"](model, *page["batch"](page["training"], generator, COUNT, LENGTH))

    fit(model, RATE, updates, loss_of, shown=shown)
    text = page["held_out"][: windows * EDGES[-1] + 1]
    inputs, targets = text[:-1].reshape(windows, -1), text[1:].reshape(windows, -1)
    with torch.no_grad():
        logits = torch.cat([model(some) for some in inputs.split(COUNT)])
        cross_entropy = torch.nn.functional.cross_entropy
        by_position = cross_entropy(logits.mT, targets, reduction="none").mean(0)
    seen = inputs_of(model, inputs[:1])
    found = {"losses": [round(by_position[a:b].mean().item(), 4) for a, b in pairwise(EDGES)]}
    found["decay"] = round(seen["g"].exp().mean().item(), 4)
    if covariance != "none":
        found["contraction"] = round(seen["contraction"].mean().item(), 4)
    return found


def run(
    updates: int = 256,
    seeds: tuple[int, ...] = SEEDS,
    names: tuple[str, ...] = tuple(BACKBONES),
    windows: int = 64,
    kept: bool = True,
) -> dict[str, Any]:
    """For each backbone, covariance and seed, what `train` finds."""
    jobs = {
        f"{title}, {covariance}, seed {seed}": partial(
            train, title, covariance, seed, updates, windows, kept
        )
        for seed in seeds
        for title in names
        for covariance in ("none", *BACKBONES[title].covariances)
    }
    found = {"seeds": list(seeds), "names": list(names), "characters": len(tutorial()["text"])}
    return {**found, "runs": trained("ccq_language", jobs, kept)}


def of_seeds(found: dict[str, Any], title: str, covariance: str, name: str) -> np.ndarray:
    """A result of each seed (seeds, …)."""
    runs = (found["runs"][f"{title}, {covariance}, seed {seed}"] for seed in found["seeds"])
    return np.array([run[name] for run in runs if name in run])


def losses(found: dict[str, Any], title: str, covariance: str) -> np.ndarray:
    """Losses (seeds, windows of positions)."""
    return of_seeds(found, title, covariance, "losses")


def tried(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The backbones that were trained, and the covariances around them."""
    return [(title, x) for title in found["names"] for x in BACKBONES[title].covariances]


def change(found: dict[str, Any], title: str, covariance: str) -> np.ndarray:
    """The loss with CCQ less that without (seeds, windows of positions)."""
    return losses(found, title, covariance) - losses(found, title, "none")


def rows(found: dict[str, Any]) -> str:
    """The mean loss without CCQ, and its change with CCQ, by position."""
    cells = []
    for title in found["names"]:
        means = losses(found, title, "none").mean(0)
        cells.append((title, "none", *(f"{x:.3f}" for x in means)))
        changes = {x: change(found, title, x) for x in BACKBONES[title].covariances}
        if "decayed" in changes:
            changes["decayed less running"] = changes["decayed"] - changes["running"]
        for name, apart in changes.items():
            cells.append(("", name, *(with_range(x, "+.3f") for x in apart.T)))
    head = ("backbone", "covariance", *(f"{a:,} to {b:,}" for a, b in pairwise(EDGES)))
    by_position = table(head, cells)

    cells = []
    for title in found["names"]:
        for covariance in ("none", *BACKBONES[title].covariances):
            means = [of_seeds(found, title, covariance, name) for name in ("decay", "contraction")]
            cells.append((title, covariance, *(f"{x.mean():.2f}" if x.size else "" for x in means)))
    of_blocks = table(("backbone", "covariance", "decay", "λ"), cells)
    return f"{by_position}\n\nMeans of the first block after training:\n\n{of_blocks}"


def draw(found: dict[str, Any]) -> Figure:
    """Change of the loss by position: one line a seed, and the mean."""
    pairs = tried(found)
    figure, axes = panels(len(pairs), height=2.6)
    limit = 1.1 * max(np.abs(change(found, *pair)).max() for pair in pairs)
    middle = [(a + b) / 2 for a, b in pairwise(EDGES)]
    for ax, (title, covariance) in zip(axes, pairs, strict=True):
        apart = change(found, title, covariance)
        colour = COLOURS[covariance]
        ax.plot(middle, apart.T, color=colour, alpha=0.4, linewidth=0.8)
        ax.plot(middle, apart.mean(0), "o-", color=colour, markersize=4)
        ax.axhline(0, color=INK, linewidth=0.8)
        ax.axvline(LENGTH, color=INK, linewidth=0.8, linestyle=":")
        ax.set(xscale="log", title=f"{title.replace(' that', chr(10) + 'that')}\n{covariance}")
        ax.set_xticks((100, 1000), ("100", "1,000"))
        ax.set_xticks([], minor=True)
        ax.set_ylim(-limit, limit)
        if ax is not axes[0]:
            ax.tick_params(labelleft=False)
    axes[0].set_ylabel("change of the loss")
    axes[len(axes) // 2].set_xlabel("position in the context")
    return figure
