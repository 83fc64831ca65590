"""LASER in the training of small language models: gradients by layer and step, and variants.

The model is that of `train_a_language_model.md`: four blocks of width 64, trained on the source of
this library, in batches of 16 windows of 64 characters. Softmax and LASER are trained from the same
weights on the same batches, plain and with each change of the paper's §4.
"""

import numpy as np
from drawing import BLUE, ORANGE, dots, panels, ticks
from make_trainings import tutorial
from recorded import table, with_range

from claims.trainings import gaining, over_seeds, trained

SMALL = {"updates": 2, "seeds": (0,), "names": ("plain, softmax", "plain, laser"), "kept": False}
VARIANTS = {
    "plain": ("{}", 4),
    "narrow heads": ("{}", 16),
    "temperature": ("temperature({})", 4),
    "per-dim temperature": ("per_dim_scale({})", 4),
    "QK norm": ("qk_norm({})", 4),
}
"""Expressions around softmax or LASER, and the number of heads."""
MECHANISMS = ("softmax", "laser")
SETTINGS = {
    f"{v}, {m}": (VARIANTS[v][0].format(m), VARIANTS[v][1]) for v in VARIANTS for m in MECHANISMS
}
EVERY = 8  # Steps that gradients are kept as means over.


def train(seed, mechanism, heads, updates):
    """The held-out loss, and the norms of the gradients of W_q and W_k of each block."""
    import torch

    from precondattn.layers.torch import Decoder

    page = tutorial()
    model = Decoder(len(page["alphabet"]), 64, heads=heads, layers=[mechanism] * 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, norms = torch.Generator().manual_seed(1 + seed), []
    attentions = [block.attention for block in model.blocks]
    for _ in range(updates):
        loss = page["loss"](model, *page["batch"](page["training"], generator))
        optimizer.zero_grad()
        loss.backward()
        squares = [[w.weight.grad.square().sum() for w in (a.q_proj, a.k_proj)] for a in attentions]
        norms.append([float(torch.stack(block).sum().sqrt()) for block in squares])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    means = [np.mean(norms[i : i + EVERY], axis=0) for i in range(0, updates, EVERY)]
    gradients = [[float(f"{x:.3g}") for x in blocks] for blocks in means]
    return {"held out": round(page["test"](model), 4), "gradients": gradients}


def run(updates=448, **options):
    found = trained("laser_training", train, SETTINGS, updates=updates, **options)
    return {"characters": len(tutorial()["text"]), **found}


def held_out(found, variant):
    """The losses on held-out text by seed, for softmax and for LASER."""
    return [over_seeds(found, f"{variant}, {name}", "held out") for name in MECHANISMS]


def variants(found):
    return [v for v in VARIANTS if f"{v}, softmax, seed {found['seeds'][0]}" in found["runs"]]


def rows(found):
    """Held-out losses, and the difference of LASER and softmax of the same seed."""
    cells = []
    for variant in variants(found):
        softmax, laser = held_out(found, variant)
        apart = laser - softmax
        means = (f"{softmax.mean():.3f}", f"{laser.mean():.3f}")
        cells.append((variant, *means, with_range(apart, "+.3f"), gaining(apart)))
    head = ("variant", "softmax", "LASER", "LASER − softmax (range of seeds)", "seeds that gain")
    return table(head, cells)


def draw(found):
    """Ratios of gradients by step, one line a block; losses of each variant."""
    figure, (left, right) = panels(2, height=3.1)
    softmax, laser = (over_seeds(found, f"plain, {x}", "gradients") for x in MECHANISMS)
    of = laser / softmax  # (seeds, means of steps, blocks)
    step = EVERY * (np.arange(of.shape[1]) + 0.5)
    for block, shade in enumerate(np.linspace(0.35, 1.0, of.shape[2])):
        y = np.exp(np.log(of[:, :, block]).mean(0))
        left.plot(step, y, color=BLUE, alpha=shade, label=f"block {block + 1}", linewidth=1.3)
    left.axhline(1, color=ORANGE, linewidth=0.8)
    left.set(xlabel="step", ylabel="gradient of LASER / softmax", yscale="log")
    ticks(left.yaxis, (0.5, 1, 2, 4))
    left.legend(loc="upper right")
    for i, variant in enumerate(variants(found)):
        softmax, laser = held_out(found, variant)
        dots(right, laser - softmax, i, 16)
    right.axvline(0, color=ORANGE, linewidth=0.8)
    right.set(yticks=range(len(variants(found))), yticklabels=variants(found))
    right.set_xlabel("loss of LASER − softmax", loc="right")
    right.invert_yaxis()
    return figure
