"""Does differential attention put less weight on noise than softmax, once both are trained?

Both are trained as in `lucid_needles.py`: one block of width 32 with four heads (differential
attention: four pairs of half the width), 128 tokens with 16 needles. Then, in sequences of up to
1,024 tokens with as many needles, the experiment measures where the weights of the queries lie.
"""

import numpy as np
from drawing import BLUE, GREEN, INK, band, legend_below, panels, ticks
from recorded import table, with_range

from claims import needles
from claims.trainings import over_seeds, trained

SMALL = {"updates": 2, "seeds": (0,), "size": 2, "lengths": (128,), "kept": False}
MECHANISMS = ("softmax", "differential")
PLACES = {"answer": GREEN, "needles": BLUE, "noise": INK}


def train(seed, name, updates, size, lengths):
    """The shares and the recall at each length."""
    model, _ = needles.train(seed, needles.layer(name), updates, size, width=32)
    return {
        "shares": [needles.shares(model, length) for length in lengths],
        "recall": [needles.accuracy(model, length, needles.NEEDLES) for length in lengths],
    }


def run(updates=1200, size=16, lengths=(128, 256, 512, 1024), **options):
    arguments = {"updates": updates, "size": size, "lengths": lengths}
    settings = {name: (name,) for name in MECHANISMS}
    found = trained("differential_noise", train, settings, **arguments, **options)
    return {"lengths": list(lengths), **found}


def shares(found, title, place):
    """Shares (seeds, lengths)."""
    runs = over_seeds(found, title, "shares")
    return np.array([[of[place] for of in run] for run in runs])


def rows(found):
    """Medians over seeds, with the range, of each place; and recall."""
    cells = []
    for i, length in enumerate(found["lengths"]):
        for title in MECHANISMS:
            of = [100 * shares(found, title, place)[:, i] for place in PLACES]
            cell = [with_range(x, ".1f", unit=" %", middle=np.median(x)) for x in of]
            recall = 100 * np.median(over_seeds(found, title, "recall")[:, i])
            cells.append((f"{length} tokens", title, *cell, f"{recall:.0f} %"))
    head = ("", "mechanism", "weight on the answer", "on other needles", "on noise", "recall")
    return table(head, cells)


def draw(found):
    figure, axes = panels(2, height=2.9)
    for ax, title in zip(axes, MECHANISMS, strict=True):
        for place, colour in PLACES.items():
            of = shares(found, title, place)
            band(ax, found["lengths"], of, colour, place, marker="o", markersize=4)
        ax.set(title=title, xlabel="tokens", xscale="log", ylim=(-0.02, 1.02))
        ticks(ax.xaxis, found["lengths"])
    axes[0].set_ylabel("share of the weights")
    legend_below(figure, axes[0], 3)
    return figure
