"""LASER in the training of small language models: gradients by layer and step, and variants.

The model is that of `train_a_language_model.md`: four blocks of width 64, trained on the source of
this library, in batches of 16 windows of 64 characters. Softmax and LASER are trained from the same
weights on the same batches, plain and with each change of the paper's §4.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from make_figures import BLUE, ORANGE, panels
from matplotlib.figure import Figure

from claims.claim import Claim, table, with_range
from claims.trainings import SEEDS, steps, trained
from claims.tutorial import tutorial

CLAIM = Claim(
    says="LASER's gradients are larger in training, and its language models better",
    source="LASER §4.1, Figure 3, Table 1; LASER §4.3, Table 4",
    verdict="holds in part",
    because=(
        "LASER's mean held-out loss is lower in all five variants, by 0.003 to 0.025 nats, which "
        "is less than what seeds differ by: it gains in 3 or 4 of 5. The gradients of W_q and W_k "
        "are not larger but for the first 50 steps: around step 20 LASER's are up to four times "
        "softmax's, and over all steps 0.82 to 1.06 of them by block."
    ),
)
SMALL = {"updates": 2, "seeds": (0,), "names": ("plain",), "kept": False}
"""Arguments of `run` for a test."""
ALT = (
    "Left, LASER's gradient is up to four times softmax's around step 20, and about as large "
    "later. Right, the differences of held-out losses lie on both sides of 0, with means slightly "
    "below it, in all five variants."
)
VARIANTS: dict[str, tuple[str, int]] = {
    "plain": ("{}", 4),
    "narrow heads": ("{}", 16),
    "temperature": ("temperature({})", 4),
    "per-dim temperature": ("per_dim_scale({})", 4),
    "QK norm": ("qk_norm({})", 4),
}
"""Expressions around softmax or LASER, and the number of heads."""
MECHANISMS = ("softmax", "laser")
EVERY = 8  # Steps that gradients are kept as means over.


def train(variant: str, mechanism: str, seed: int, updates: int, shown: bool) -> dict[str, Any]:
    """The held-out loss, and the norms of the gradients of W_q and W_k of each block."""
    import torch

    from precondattn.layers.torch import Decoder

    torch.set_num_threads(1)
    page, (around, heads) = tutorial(), VARIANTS[variant]
    torch.manual_seed(seed)
    layers = [around.format(mechanism)] * 4
    model = Decoder(len(page["alphabet"]), 64, heads=heads, layers=layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, norms = torch.Generator().manual_seed(1 + seed), []
    weights = [
        [block.attention.q_proj.weight, block.attention.k_proj.weight] for block in model.blocks
    ]
    for _ in steps(updates, shown):
        loss = page["loss"](model, *page["batch"](page["training"], generator))
        optimizer.zero_grad()
        loss.backward()
        squares = [[w.grad.square().sum() for w in block] for block in weights]
        norms.append([float(torch.stack(block).sum().sqrt()) for block in squares])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    means = [np.mean(norms[i : i + EVERY], axis=0) for i in range(0, updates, EVERY)]
    gradients = [[float(f"{x:.3g}") for x in blocks] for blocks in means]
    return {"held out": round(page["test"](model), 4), "gradients": gradients}


def run(
    updates: int = 448,
    seeds: tuple[int, ...] = SEEDS,
    names: tuple[str, ...] = tuple(VARIANTS),
    kept: bool = True,
) -> dict[str, Any]:
    """For each variant, mechanism and seed, the held-out loss and the gradients."""
    jobs = {
        f"{variant}, {mechanism}, seed {seed}": partial(
            train, variant, mechanism, seed, updates, kept
        )
        for seed in seeds
        for variant in names
        for mechanism in MECHANISMS
    }
    found = {"seeds": list(seeds), "names": list(names), "characters": len(tutorial()["text"])}
    return {**found, "runs": trained("laser_training", jobs, kept)}


def held_out(found: dict[str, Any], variant: str, mechanism: str) -> np.ndarray:
    """The held-out losses (seeds)."""
    runs = (found["runs"][f"{variant}, {mechanism}, seed {seed}"] for seed in found["seeds"])
    return np.array([run["held out"] for run in runs])


def ratios(found: dict[str, Any]) -> np.ndarray:
    """LASER's gradient over softmax's, plain: (seeds, means of steps, blocks)."""
    runs, plain = found["runs"], found["names"][0]
    softmax, laser = (
        np.array([runs[f"{plain}, {name}, seed {seed}"]["gradients"] for seed in found["seeds"]])
        for name in MECHANISMS
    )
    return laser / softmax


def rows(found: dict[str, Any]) -> str:
    """Held-out losses, and the difference of LASER and softmax of the same seed."""
    cells = []
    for variant in found["names"]:
        softmax, laser = (held_out(found, variant, name) for name in MECHANISMS)
        apart = laser - softmax
        spread = with_range(apart, "+.3f")
        means = (f"{softmax.mean():.3f}", f"{laser.mean():.3f}")
        cells.append((variant, *means, spread, f"{(apart < 0).sum()} of {len(apart)}"))
    head = ("variant", "softmax", "LASER", "LASER − softmax (range of seeds)", "seeds that gain")
    return table(head, cells)


def draw(found: dict[str, Any]) -> Figure:
    """Ratios of gradients by step, one line a block; losses of each variant."""
    figure, (left, right) = panels(2, height=3.1)
    of = ratios(found)
    step = EVERY * (np.arange(of.shape[1]) + 0.5)
    for block, shade in enumerate(np.linspace(0.35, 1.0, of.shape[2])):
        y = np.exp(np.log(of[:, :, block]).mean(0))
        left.plot(step, y, color=BLUE, alpha=shade, label=f"block {block + 1}", linewidth=1.3)
    left.axhline(1, color=ORANGE, linewidth=0.8)
    left.set(xlabel="step", ylabel="gradient of LASER / softmax", yscale="log")
    left.set_yticks((0.5, 1, 2, 4), ("0.5", "1", "2", "4"))
    left.set_yticks([], minor=True)
    left.legend(loc="upper right")
    for i, variant in enumerate(found["names"]):
        apart = held_out(found, variant, "laser") - held_out(found, variant, "softmax")
        right.plot(apart, [i] * len(apart), "o", color=BLUE, markersize=4, alpha=0.7)
        right.plot(apart.mean(), i, "|", color=ORANGE, markersize=16)
    right.axvline(0, color=ORANGE, linewidth=0.8)
    right.set(yticks=range(len(found["names"])), yticklabels=found["names"])
    right.set_xlabel("loss of LASER − softmax", loc="right")
    right.invert_yaxis()
    return figure
