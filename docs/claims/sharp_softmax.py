"""Does softmax attention stop learning once it is sharp, and does LUCID go on?

Two tasks after one another, on permutations x of 0 … 9, with one head of width 256:

    first    y_t = x_t                       which makes every token attend to itself
    then     y_t = (x_1 + … + x_t) / t       which needs equal attention to all

The logits have the factor 1/√d, or none. Both mechanisms see the same batches.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from make_figures import BLUE, INK, ORANGE, panels
from matplotlib.figure import Figure

import precondattn as pa
from claims.claim import Claim, table
from claims.trainings import SEEDS, steps, trained

CLAIM = Claim(
    says="Softmax stops learning when it is sharp, LUCID does not",
    source="LUCID §3.1, Eq. 1; LUCID Appendix A.1, proof",
    verdict="does not hold",
    because=(
        "With the factor 1/√d both learn the second task, softmax in 3 of 5 seeds and LUCID in "
        "4 of 5 down to nothing, the others to 0.03 to 0.1; keys of width 256 hardly overlap, so "
        "that LUCID nearly is softmax. Softmax stays at 1.2 to 1.4 if the factor is left out, and "
        "then LUCID stays at the same loss."
    ),
)
SMALL = {"first": 3, "then": 3, "short": 3, "seeds": (0, 1), "width": 8, "kept": False}
"""Arguments of `run` for a test."""
ALT = (
    "Left, with 1/√d softmax and LUCID both learn the second task, in most seeds down to nothing. "
    "Right, without the factor both stay at losses of 1.2 to 1.4."
)
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


def train(name: str, seed: int, first: int, then: int, width: int, shown: bool) -> dict[str, Any]:
    """Losses every `EVERY` steps, and how sharp attention and how large gradients are between."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    embedding = torch.randn(TOKENS, width)
    w_q, w_k, w_v = (torch.randn(width, width) / width**0.5 for _ in range(3))
    out, bias = torch.randn(width, 1) / width**0.5, torch.zeros(())
    weights = [w.requires_grad_() for w in (embedding, w_q, w_k, w_v, out, bias)]
    optimizer = torch.optim.Adam(weights, lr=1e-4)
    attn, lengths = pa.parse(name), torch.arange(1, TOKENS + 1.0)
    losses, found = [], {}
    for step in steps(first + then, shown):
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
    then_means = [float(f"{x:.3g}") for x in means]
    return {
        **found,
        "first": float(np.mean(losses[max(0, first - EVERY) : first])),
        "then": then_means,
    }


def between(scale: float, q: Any, k: Any) -> dict[str, float]:
    """Softmax's mean weight on a token itself, and the largest Φ_ij of two tokens."""
    width = k.shape[1]
    unit = k / k.square().mean(1, keepdim=True).sqrt()
    phi = ((unit @ unit.mT - width) / width**0.5).exp().fill_diagonal_(0)
    rows = (x[None, :, None] for x in (q, k, k))
    own = pa.diagnostics.weights(pa.Softmax(causal=False, scale=scale), *rows)[0, 0].diagonal()
    return {"own weight": float(own.mean()), "overlap": float(phi.max())}


def run(
    first: int = 30_000,
    then: int = 10_000,
    short: int = 5_000,
    seeds: tuple[int, ...] = SEEDS,
    width: int = 256,
    kept: bool = True,
) -> dict[str, Any]:
    """For each seed and mechanism, the losses; without the factor the first task is `short`."""
    jobs = {}
    for seed in seeds:
        for title, (name, _) in MECHANISMS.items():
            before = first if name in ("softmax", "lucid") else short
            key = f"{title.replace('/', ':')}, seed {seed}"
            jobs[key] = partial(train, name, seed, before, then, width, kept)
    return {"seeds": list(seeds), "floor": FLOOR, "runs": trained("sharp_softmax", jobs, kept)}


def of(found: dict[str, Any], title: str) -> list[dict[str, Any]]:
    """The runs of a mechanism, one for each seed."""
    return [x for name, x in found["runs"].items() if name.startswith(title.replace("/", ":"))]


def rows(found: dict[str, Any]) -> str:
    """Medians over seeds, and the range of the last losses."""
    cells = []
    for title in MECHANISMS:
        runs = of(found, title)
        last = sorted(x["then"][-1] for x in runs)
        others = float(np.median([1 - x["own weight"] for x in runs]))
        middle = [float(np.median([x[y] for x in runs])) for y in ("first", "overlap", "gradient")]
        count = f"{sum(x < LEARNED for x in last)} of {len(runs)}"
        cells.append((title, others, *middle, count, last[0], last[-1]))
    head = "weight on other tokens", "loss of the first task", "largest Φ_ij", "gradient of W_q"
    return table(("logits", *head, "learned the second", "least loss", "largest loss"), cells)


def draw(found: dict[str, Any]) -> Figure:
    """Losses of the second task, one line a seed."""
    figure, axes = panels(2, height=2.9)
    for title, (_, colour) in MECHANISMS.items():
        ax = axes["no factor" in title]
        style = "-" if colour == BLUE else "--"  # LUCID's lines lie on softmax's.
        for x in of(found, title):
            step = EVERY * (np.arange(len(x["then"])) + 0.5)
            ax.plot(step, x["then"], style, color=colour, linewidth=1.0)
        ax.plot([], [], style, color=colour, label=title.split(",")[0])
    for ax, name in zip(axes, ("logits with 1/√d", "no factor"), strict=True):
        ax.axhline(found["floor"], color=INK, linewidth=0.8, linestyle=":")
        ax.set(title=name, xlabel="step of the second task")
    axes[0].set(ylabel="loss", yscale="log")
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=2, loc="outside lower center")
    return figure
