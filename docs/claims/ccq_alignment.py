"""Do the keys of needles lie off the directions in which keys vary most?

Small models are trained to recall pairs (`pairs.py`). Then, in 256 tokens with four pairs and noise
else, the alignment of each key is the share of its centred energy in the top 16 of the 64
eigenvectors of all keys, and the gap is that of the pairs' keys less that of noise.
"""

from functools import partial

from drawing import BLUE, ORANGE, legend_below, panels
from recorded import table, with_range

import precondattn as pa
from claims import needles, pairs
from claims.trainings import over_seeds, trained

SMALL = {"updates": 2, "seeds": (0,), "size": 2, "names": ("GLA",), "kept": False}
MECHANISMS = {"softmax": ("softmax",), "GLA": ("gla",), "GLA with CCQ": ("ccq(gla)",)}
MECHANISMS["gated delta"] = ("gated_delta",)
RANK, LENGTH = 16, 256


def train(seed, name, updates, size):
    """The mean alignment of keys of pairs and of noise, before and after training; the recall."""
    import torch

    model = pairs.decoder(name)
    before = alignments(model)
    torch.manual_seed(seed)
    model = pairs.decoder(name)  # It has the same weights; later draws are as from the seed.
    pairs.learn(model, updates, size)
    recall = pairs.recall(model, LENGTH, pairs.PAIRS)
    return {"before": before, "after": alignments(model), "recall": recall}


def alignments(model):
    """The means for keys at the pairs' values, which hold key and value, and for keys of noise."""
    import torch

    torch.manual_seed(0)
    tokens, _, places = pairs.batch(32, LENGTH, pairs.PAIRS)
    share = pa.alignment(needles.inputs_of(model, tokens)["k"], RANK)[:, :, 0]
    is_noise = tokens >= pairs.KEYS + pairs.VALUES
    means = share.gather(1, places).nanmean(), share[is_noise].nanmean()
    return [round(float(mean), 4) for mean in means]


run = partial(trained, "ccq_alignment", train, MECHANISMS, updates=1000, size=32)


def rows(found):
    """Mean alignments, and the gap with its range over seeds."""
    cells = []
    for title in found["names"]:
        for when in ("before", "after"):
            needle, noise = over_seeds(found, title, when).T
            means = (f"{needle.mean():.2f}", f"{noise.mean():.2f}")
            first = title if when == "before" else ""
            gap = with_range(needle - noise, "+.2f")
            cells.append((first, f"{when} training", *means, gap))
    head = ("model", "", "alignment of needles", "of noise", "gap (range of seeds)")
    return table(head, cells)


def draw(found):
    """Alignments after training, one point a seed."""
    figure, (ax,) = panels(1, height=2.4)
    for i, title in enumerate(found["names"]):
        both = over_seeds(found, title, "after").T
        for values, colour, label in zip(both, (ORANGE, BLUE), ("needles", "noise"), strict=True):
            label = label if i == 0 else None
            ax.plot(values, [i] * len(values), "o", color=colour, alpha=0.7, label=label)
    ax.set(yticks=range(len(found["names"])), yticklabels=found["names"], xlim=(0, 1.02))
    ax.set_xlabel("share of the energy in the top 16 of 64 directions")
    ax.invert_yaxis()
    legend_below(figure, ax, 2)
    return figure
