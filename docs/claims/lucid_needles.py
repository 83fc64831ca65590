"""Do LUCID and its variants recall more needles than softmax, in narrow heads?

One block of width 32 with four heads of 8 channels is trained on sequences of 128 tokens with 16
needles (`needles.py`), and tested on up to 1,024 tokens with 128 of them.
"""

from contextlib import nullcontext

import numpy as np
from drawing import BLUE, GREEN, INK, ORANGE, band, legend_below, panels, ticks
from recorded import table, with_range

import precondattn as pa
from claims import needles
from claims.trainings import means, over_seeds, titles, trained

SMALL = {"updates": 2, "seeds": (0,), "size": 2, "names": ("softmax", "LUCID"), "kept": False}
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
SHOWN = {"softmax": INK, "LUCID": ORANGE, "differential": BLUE, "gated delta": "#b05fc0"}
SHOWN["PaTH"] = GREEN
EVERY = 20


def train(seed, name, heads_width, updates, size):
    """The recall of each test, where the weights lie, and the mean losses of every 20 steps."""
    # The definition of PaTH is the fastest at 128 tokens.
    with pa.use_backend("reference") if "path" in name else nullcontext():
        arguments, width = needles.layer(name), 4 * heads_width
        model, losses = needles.train(seed, arguments, updates, size, width=width)
        recall = [needles.accuracy(model, *test) for test in needles.TESTS]
        shares = needles.shares(model)
    return {"recall": recall, "shares": shares, "losses": means(losses, EVERY)}


def own_weight(width):
    """The share of a token's own value in LUCID's y, of absolute values, for 128 random keys."""
    rng, v = np.random.default_rng(0), np.eye(needles.LENGTH)[None, :, None]
    rows = np.abs([pa.LucidSolve()(rng.normal(size=(1, 128, 1, width)), v) for _ in range(20)])
    return float((np.diagonal(rows[:, 0, :, 0], 0, 1, 2) / rows[:, 0, :, 0].sum(-1))[:, 64:].mean())


def run(updates=1200, size=16, **options):
    own = {str(width): own_weight(width) for width in (8, 16, 32, 64)}
    arguments = {"updates": updates, "size": size, **options}
    return {"own": own, **trained("lucid_needles", train, MECHANISMS, **arguments)}


def rows(found):
    """Recall by the number of needles, medians over seeds with their range, and two more numbers.

    These are the first step at which the loss is below 1, and the weight on the answer.
    """
    cells = []
    for title in titles(found, MECHANISMS):
        recall = 100 * over_seeds(found, title, "recall")
        shown = [with_range(of, ".0f", middle=np.median(of)) for of in recall.T[:4]]
        losses = over_seeds(found, title, "losses")
        is_low = np.concatenate([losses < 1, np.ones((len(losses), 1), bool)], axis=1)
        first = int(np.median(is_low.argmax(1)))
        learned = f"{EVERY * first:,}" if first < losses.shape[1] else "never"
        share = np.median(over_seeds(found, title, "shares", "answer"))
        cells.append((title, *shown, learned, f"{100 * share:.0f} %"))
    counts = [f"{count} of {length:,} tokens" for length, count in needles.TESTS[:4]]
    head = ("mechanism", *counts, "steps to a loss of 1", "weight on the answer")
    own = [f"{100 * share:.0f} %" for share in found["own"].values()]
    widths = ("width of random keys", *found["own"])
    return f"{table(head, cells)}\n\n{table(widths, [('a value in its own row of y', *own)])}"


def draw(found):
    """Recall by the number of needles, and losses."""
    figure, (left, right) = panels(2, height=3.1)
    counts = [count for _, count in needles.TESTS[:4]]
    for title in titles(found, SHOWN):
        losses = over_seeds(found, title, "losses")
        step = EVERY * (np.arange(losses.shape[1]) + 0.5)
        recall = over_seeds(found, title, "recall")[:, :4]
        for ax, x, y in ((left, counts, recall), (right, step, losses)):
            band(ax, x, y, SHOWN[title], title, alpha=0.12, linewidth=1.4)
    left.set(xlabel="needles", ylabel="recall", xscale="log", ylim=(-0.02, 1.02))
    ticks(left.xaxis, counts)
    right.set(xlabel="step", ylabel="loss")
    legend_below(figure, left, 3)
    return figure
