"""Do LUCID and its variants recall more needles than softmax, in narrow heads?

One block of width 32 with four heads of 8 channels is trained on sequences of 128 tokens with 16
needles (`needles.py`), and tested on up to 1,024 tokens with 128 of them.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
from make_figures import BLUE, GREEN, INK, ORANGE, panels
from matplotlib.figure import Figure

import precondattn as pa
from claims import needles
from claims.claim import Claim, table, with_range
from claims.trainings import SEEDS, trained

CLAIM = Claim(
    says="LUCID recalls more needles than softmax, PaTH, differential attention and delta rules",
    source="LUCID §4.2, Tables 2 to 4; LUCID §4.4, Table 5",
    verdict="does not hold",
    because=(
        "In heads of 8 channels softmax recalls every needle, and LUCID 96 %, which falls to 55 % "
        "among 128 needles. A sharp head reads one row of y, of which the token's own value is a "
        "fifth where so narrow keys overlap. A learned β recovers most of it; in heads of 32 "
        "channels LUCID recalls all, as softmax does."
    ),
)
SMALL = {"updates": 2, "seeds": (0,), "batch": 2, "names": ("softmax", "LUCID"), "kept": False}
"""Arguments of `run` for a test."""
ALT = (
    "Left, softmax and PaTH recall nearly all of 16 to 128 needles; differential attention falls "
    "to 0.6, LUCID to 0.55, and gated delta recalls almost none. Right, LUCID's loss falls later "
    "than that of softmax, PaTH and differential attention."
)
MECHANISMS = {
    "softmax": ("softmax", 8),
    "softmax, heads of 32": ("softmax", 32),
    "LUCID": ("lucid", 8),
    "LUCID, heads of 32": ("lucid", 32),
    "LUCID, learned β": ("lucid[beta=true]", 8),
    "LUCID, QK norm": ("lucid[normalize=queries_and_keys]", 8),
    "LUCID, rows by their maximum": ("lucid[normalize=rows]", 8),
    "differential": ("differential", 8),
    "gated delta": ("gated_delta", 8),
    "PaTH": ("path", 8),
    "LUCID around PaTH": ("lucid(path)", 8),
}
"""The expression of each mechanism, and the width of its heads."""
SHOWN = {"softmax": INK, "LUCID": ORANGE, "PaTH": GREEN, "differential": BLUE}
SHOWN["gated delta"] = "#b05fc0"
EVERY = 20


def train(title: str, seed: int, updates: int, size: int, shown: bool) -> dict[str, Any]:
    """The recall of each test, where the weights lie, and the mean losses of every 20 steps."""
    name, heads_width = MECHANISMS[title]
    arguments, width = needles.layer(name), 4 * heads_width
    # The definition of PaTH is the fastest at 128 tokens.
    with pa.use_backend("reference") if "path" in name else nullcontext():
        model, losses = needles.train(arguments, seed, updates, size, shown, width=width)
        recall = [needles.accuracy(model, *test) for test in needles.TESTS]
        shares = needles.shares(model)
    means = [np.mean(losses[i : i + EVERY]) for i in range(0, updates, EVERY)]
    return {"recall": recall, "shares": shares, "losses": [round(float(x), 4) for x in means]}


def own_weight(width: int) -> float:
    """The share of a token's own value in LUCID's y, of absolute values, for 128 random keys."""
    rng, v = np.random.default_rng(0), np.eye(needles.LENGTH)[None, :, None]
    rows = np.abs([pa.LucidSolve()(rng.normal(size=(1, 128, 1, width)), v) for _ in range(20)])
    return float((np.diagonal(rows[:, 0, :, 0], 0, 1, 2) / rows[:, 0, :, 0].sum(-1))[:, 64:].mean())


def run(
    updates: int = 1200,
    seeds: tuple[int, ...] = SEEDS,
    batch: int = 16,
    names: tuple[str, ...] = tuple(MECHANISMS),
    kept: bool = True,
) -> dict[str, Any]:
    """For each mechanism and seed, recall, shares and losses."""
    jobs = {
        f"{title}, seed {seed}": partial(train, title, seed, updates, batch, kept)
        for title in names
        for seed in seeds
    }
    own = {str(width): own_weight(width) for width in (8, 16, 32, 64)}
    return {"seeds": list(seeds), "own": own, "runs": trained("lucid_needles", jobs, kept)}


def of(found: dict[str, Any], title: str, what: str) -> np.ndarray:
    """The saved results of a mechanism (seeds, …)."""
    return np.array([found["runs"][f"{title}, seed {seed}"][what] for seed in found["seeds"]])


def titles(found: dict[str, Any]) -> list[str]:
    """The mechanisms that were trained."""
    return [title for title in MECHANISMS if f"{title}, seed {found['seeds'][0]}" in found["runs"]]


def rows(found: dict[str, Any]) -> str:
    """Recall by the number of needles, medians over seeds with their range, and two more numbers.

    These are the first step at which the loss is below 1, and the weight on the answer.
    """
    cells = []
    for title in titles(found):
        recall = 100 * of(found, title, "recall")
        shown = [with_range(of, ".0f", middle=np.median(of)) for of in recall.T[:4]]
        shares = [run["answer"] for run in of(found, title, "shares")]
        losses = of(found, title, "losses")
        is_low = np.concatenate([losses < 1, np.ones((len(losses), 1), bool)], axis=1)
        first = int(np.median(is_low.argmax(1)))
        learned = f"{EVERY * first:,}" if first < losses.shape[1] else "never"
        cells.append((title, *shown, learned, f"{100 * np.median(shares):.0f} %"))
    counts = [f"{count} of {length:,} tokens" for length, count in needles.TESTS[:4]]
    head = ("mechanism", *counts, "steps to a loss of 1", "weight on the answer")
    own = [f"{100 * share:.0f} %" for share in found["own"].values()]
    widths = ("width of random keys", *found["own"])
    return f"{table(head, cells)}\n\n{table(widths, [('a value in its own row of y', *own)])}"


def draw(found: dict[str, Any]) -> Figure:
    """Recall by the number of needles, and losses: medians, and the range of the seeds."""
    figure, (left, right) = panels(2, height=3.1)
    counts = [count for _, count in needles.TESTS[:4]]
    for title in titles(found):
        if title not in SHOWN:
            continue
        colour, losses = SHOWN[title], of(found, title, "losses")
        step = EVERY * (np.arange(losses.shape[1]) + 0.5)
        recall = of(found, title, "recall")[:, :4]
        for ax, x, y in ((left, counts, recall), (right, step, losses)):
            low, middle, high = np.quantile(y, (0, 0.5, 1), axis=0)
            ax.plot(x, middle, color=colour, label=title, linewidth=1.4)
            ax.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
    left.set(xlabel="needles", ylabel="recall", xscale="log", ylim=(-0.02, 1.02))
    left.set_xticks(counts, [str(x) for x in counts])
    left.set_xticks([], minor=True)
    right.set(xlabel="step", ylabel="loss")
    figure.legend(*left.get_legend_handles_labels(), ncols=3, loc="outside lower center")
    return figure
