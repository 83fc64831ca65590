"""Does softmax attention stop learning once it is sharp, and does LUCID go on?

Two tasks after one another, on permutations x of 0 … 9, with one head of width 256:

    first    y_t = x_t                       which makes every token attend to itself
    then     y_t = (x_1 + … + x_t) / t       which needs equal attention to all

The logits have the factor 1/√d, or none. Both mechanisms see the same batches.
"""

import numpy as np
from drawing import BLUE, INK, ORANGE, legend_below, panels
from recorded import table

import precondattn as pa
from claims.trainings import over_seeds, trained

SMALL = {"first": 3, "then": 3, "short": 3, "seeds": (0, 1), "width": 8, "kept": False}
TOKENS = 10
EVERY = 100
LEARNED = 1e-6
FLOOR = 1.389238457128393
"""The second task's loss of the best linear function of x_t: see the page."""
MECHANISMS = {
    "softmax, 1/√d": ("softmax", BLUE),
    "LUCID, 1/√d": ("lucid", ORANGE),
    "softmax, no factor": ("softmax[scale=1.0]", BLUE),
    "LUCID, no factor": ("lucid(softmax[scale=1.0])", ORANGE),
}


def train(seed, name, first, then, width):
    """Losses every `EVERY` steps, and how sharp attention and how large gradients are between."""
    import torch

    embedding = torch.randn(TOKENS, width)
    w_q, w_k, w_v = (torch.randn(width, width) / width**0.5 for _ in range(3))
    out, bias = torch.randn(width, 1) / width**0.5, torch.zeros(())
    weights = [w.requires_grad_() for w in (embedding, w_q, w_k, w_v, out, bias)]
    optimizer = torch.optim.Adam(weights, lr=1e-4)
    attn, lengths = pa.parse(name), torch.arange(1, TOKENS + 1.0)
    losses, found = [], {}
    for step in range(first + then):
        x = torch.rand(64, TOKENS).argsort(1)
        y = x.float() if step < first else x.float().cumsum(1) / lengths
        q, k, v = embedding @ w_q, embedding @ w_k, embedding @ w_v @ out
        rows = (torch.nn.functional.embedding(x, of)[:, :, None] for of in (q, k, v))
        guess = attn(*rows, backend="reference")[:, :, 0, 0] + bias
        loss = (guess - y).square().mean()
        loss.backward()
        if step == first:
            found = between(1.0 if "scale" in name else width**-0.5, q.detach(), k.detach())
            found["gradient"] = float(w_q.grad.abs().median())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if step > first + EVERY and np.mean(losses[-EVERY:]) < LEARNED:
            break  # The task is learned.
    means = [np.mean(losses[i : i + EVERY]) for i in range(first, len(losses), EVERY)]
    found["first"] = float(np.mean(losses[max(0, first - EVERY) : first]))
    return {**found, "then": [float(f"{x:.3g}") for x in means]}


def between(scale, q, k):
    """Softmax's mean weight on a token itself, and the largest Φ_ij of two tokens."""
    width = k.shape[1]
    unit = k / k.square().mean(1, keepdim=True).sqrt()
    phi = ((unit @ unit.mT - width) / width**0.5).exp().fill_diagonal_(0)
    rows = (x[None, :, None] for x in (q, k, k))
    own = pa.diagnostics.weights(pa.Softmax(causal=False, scale=scale), *rows)[0, 0].diagonal()
    return {"own weight": float(own.mean()), "overlap": float(phi.max())}


def run(first=30_000, then=10_000, short=5_000, width=256, **options):
    """Without the factor the first task is `short`."""
    settings = {
        title: (name, short if "scale" in name else first, then, width)
        for title, (name, _) in MECHANISMS.items()
    }
    return {"floor": FLOOR, **trained("sharp_softmax", train, settings, **options)}


def rows(found):
    """Medians over seeds, and the range of the last losses."""
    cells = []
    for title in MECHANISMS:
        last = sorted(losses[-1] for losses in over_seeds(found, title, "then"))
        others = 1 - over_seeds(found, title, "own weight")
        more = [over_seeds(found, title, x) for x in ("first", "overlap", "gradient")]
        middle = [float(np.median(x)) for x in (others, *more)]
        count = f"{sum(x < LEARNED for x in last)} of {len(last)}"
        cells.append((title, *middle, count, last[0], last[-1]))
    head = "weight on other tokens", "loss of the first task", "largest Φ_ij", "gradient of W_q"
    return table(("logits", *head, "learned the second", "least loss", "largest loss"), cells)


def draw(found):
    """Losses of the second task, one line a seed."""
    figure, axes = panels(2, height=2.9)
    for title, (_, colour) in MECHANISMS.items():
        ax = axes["no factor" in title]
        style = "-" if colour == BLUE else "--"  # LUCID's lines lie on softmax's.
        for losses in over_seeds(found, title, "then"):
            step = EVERY * (np.arange(len(losses)) + 0.5)
            ax.plot(step, losses, style, color=colour, linewidth=1.0)
        ax.plot([], [], style, color=colour, label=title.split(",")[0])
    for ax, name in zip(axes, ("logits with 1/√d", "no factor"), strict=True):
        ax.axhline(found["floor"], color=INK, linewidth=0.8, linestyle=":")
        ax.set(title=name, xlabel="step of the second task")
    axes[0].set(ylabel="loss", yscale="log")
    legend_below(figure, axes[0], 2)
    return figure
