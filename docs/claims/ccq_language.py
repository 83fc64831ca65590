"""CCQ in language modelling beyond the trained length, and where the backbone forgets.

Decoders of two blocks of width 64 with two heads are trained on windows of 64 characters of the
text of `train_a_language_model.md`, and tested on 64 windows of 1,024 held-out characters that do
not overlap. The loss is that of characters by their position in the window.

Backbones that forget have the published gate and another e^{−1/4} at each token, so that they
remember 4 tokens at most. There CCQ is tried also with `covariance=decayed`, whose weights decay as
the state does. All models of a backbone start from the same weights and see the same batches.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from drawing import GREEN, INK, ORANGE, panels, ticks
from make_trainings import tutorial
from recorded import table, with_range

from claims.needles import inputs_of
from claims.trainings import fit, over_seeds, titles, trained
from precondattn.layers.recipes.gates import DecayWithBias

SMALL = {"updates": 1, "seeds": (0,), "names": ("GLA, none", "GLA, running"), "windows": 1}
SMALL["kept"] = False
LENGTH, COUNT = 64, 16
"""Characters of a window, and windows of a batch, in the training."""
EDGES = (0, 64, 128, 256, 512, 1024)
"""Bounds of the windows of positions whose losses are averaged; the first window is trained."""
MEMORY = 4
"""The most tokens that a backbone with strong forgetting remembers."""


@dataclass(frozen=True)
class Forgetful(DecayWithBias):
    """The published log decay, less 1/4."""

    def make(self, tokens, p):
        return super().make(tokens, p) - 1 / MEMORY


BACKBONES = {
    "GLA": ("gla", {}, ("running",)),
    "gated delta": ("gated_delta", {}, ("running", "decayed")),
    "gated delta that forgets": ("gated_delta", {"g": Forgetful()}, ("running", "decayed")),
}
"""Mechanisms, recipes, and the covariances that are tried around them."""
COLOURS = {"running": ORANGE, "decayed": GREEN}
SETTINGS = {
    f"{title}, {x}": (title, x) for title, of in BACKBONES.items() for x in ("none", *of[2])
}


def train(seed, title, covariance, updates, windows):
    """The losses by position, and means of λ and of the decay in the first block."""
    import torch

    from precondattn.layers.torch import Decoder

    page, (backbone, recipes, _) = tutorial(), BACKBONES[title]
    generator = torch.Generator().manual_seed(1 + seed)

    def decoder(mechanism):
        layer = {"mechanism": mechanism, "recipes": recipes}
        return Decoder(len(page["alphabet"]), 64, heads=2, layers=[layer] * 2)

    def loss_of():
        return page["loss"](model, *page["batch"](page["training"], generator, COUNT, LENGTH))

    model = decoder(backbone)
    if covariance != "none":
        plain = model.state_dict()
        model = decoder(f"ccq[covariance={covariance}]({backbone})")
        # The order in which weights are drawn depends on the mechanism.
        model.load_state_dict({**model.state_dict(), **plain})
    fit(model, 3e-3, updates, loss_of)
    text = page["held_out"][: windows * EDGES[-1] + 1]
    inputs, targets = text[:-1].reshape(windows, -1), text[1:].reshape(windows, -1)
    with torch.no_grad():
        logits = torch.cat([model(some) for some in inputs.split(COUNT)])
        of = torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none").mean(0)
    seen = inputs_of(model, inputs[:1])
    found = {"losses": [round(of[a:b].mean().item(), 4) for a, b in pairwise(EDGES)]}
    found["decay"] = round(seen["g"].exp().mean().item(), 4)
    if covariance != "none":
        found["contraction"] = round(seen["contraction"].mean().item(), 4)
    return found


def run(updates=256, windows=64, **options):
    arguments = {"updates": updates, "windows": windows, **options}
    found = trained("ccq_language", train, SETTINGS, **arguments)
    return {"characters": len(tutorial()["text"]), **found}


def change(found, key):
    """The loss with CCQ less that without (seeds, windows of positions)."""
    plain = f"{SETTINGS[key][0]}, none"
    return over_seeds(found, key, "losses") - over_seeds(found, plain, "losses")


def rows(found):
    """The mean loss without CCQ, and its change with CCQ, by position."""
    cells, of_blocks = [], []
    for key in titles(found, SETTINGS):
        title, covariance = SETTINGS[key]
        if covariance == "none":
            means = over_seeds(found, key, "losses").mean(0)
            cells.append((title, "none", *(f"{x:.3f}" for x in means)))
            changes = {}
        else:
            changes[covariance] = change(found, key)
            cells.append(("", covariance, *(with_range(x, "+.3f") for x in changes[covariance].T)))
        if covariance == "decayed":
            apart = (changes["decayed"] - changes["running"]).T
            cells.append(("", "decayed less running", *(with_range(x, "+.3f") for x in apart)))
        decay = f"{over_seeds(found, key, 'decay').mean():.2f}"
        has_factor = covariance != "none"
        factor = f"{over_seeds(found, key, 'contraction').mean():.2f}" if has_factor else ""
        of_blocks.append((title, covariance, decay, factor))
    head = ("backbone", "covariance", *(f"{a:,} to {b:,}" for a, b in pairwise(EDGES)))
    second = table(("backbone", "covariance", "decay", "λ"), of_blocks)
    return f"{table(head, cells)}\n\nMeans of the first block after training:\n\n{second}"


def draw(found):
    """Change of the loss by position: one line a seed, and the mean."""
    keys = [key for key in titles(found, SETTINGS) if SETTINGS[key][1] != "none"]
    figure, axes = panels(len(keys), height=2.6)
    limit = 1.1 * max(np.abs(change(found, key)).max() for key in keys)
    middle = [(a + b) / 2 for a, b in pairwise(EDGES)]
    for ax, key in zip(axes, keys, strict=True):
        (title, covariance), apart = SETTINGS[key], change(found, key)
        colour = COLOURS[covariance]
        ax.plot(middle, apart.T, color=colour, alpha=0.4, linewidth=0.8)
        ax.plot(middle, apart.mean(0), "o-", color=colour, markersize=4)
        ax.axhline(0, color=INK, linewidth=0.8)
        ax.axvline(LENGTH, color=INK, linewidth=0.8, linestyle=":")
        ax.set(xscale="log", title=f"{title.replace(' that', chr(10) + 'that')}\n{covariance}")
        ticks(ax.xaxis, (100, 1000))
        ax.set_ylim(-limit, limit)
        if ax is not axes[0]:
            ax.tick_params(labelleft=False)
    axes[0].set_ylabel("change of the loss")
    axes[len(axes) // 2].set_xlabel("position in the context")
    return figure
