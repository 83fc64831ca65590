"""Does CCQ help any backbone recall?

One block of width 64 with one head is trained on sequences of 32 tokens that hold four pairs of a
key and a value, of 64 each, between tokens of noise, and then ask for the values of all keys. It is
tested on longer sequences with more pairs. λ is learned, as the layer's recipe has it.
"""

from functools import partial

from drawing import BLUE, ORANGE, band, legend_below, panels, ticks
from recorded import table, with_range

from claims import pairs
from claims.trainings import over_seeds, titles, trained

SMALL = {"updates": 2, "seeds": (0,), "size": 2, "names": ("GLA", "CCQ, GLA"), "kept": False}
BACKBONES = {
    "GLA": "gla",
    "gated delta": "gated_delta",
    "GLA with Hedgehog": "hedgehog(gla)",
    "Mamba-2": "ssd",
    "retention": "retention",
}
SETTINGS = {title: (name,) for title, name in BACKBONES.items()}
SETTINGS |= {f"CCQ, {title}": (f"ccq({name})",) for title, name in BACKBONES.items()}
TESTS = ((32, 4), (64, 8), (128, 16), (256, 32))
"""The lengths and numbers of pairs in tests."""


def train(seed, name, updates, size):
    """The recall of each test, and the last loss."""
    model = pairs.decoder(name)
    loss = pairs.learn(model, updates, size)
    return {"recall": [pairs.recall(model, *test) for test in TESTS], "loss": loss}


run = partial(trained, "ccq_recall", train, SETTINGS, updates=1500, size=32)


def rows(found):
    """The mean recall without and with CCQ, and the difference of the same seed with its range."""
    cells = []
    for title in titles(found, BACKBONES):
        plain, ccq = (100 * over_seeds(found, x, "recall") for x in (title, f"CCQ, {title}"))
        for i, (length, count) in enumerate(TESTS):
            means = (f"{plain[:, i].mean():.0f} %", f"{ccq[:, i].mean():.0f} %")
            spread = with_range((ccq - plain)[:, i], "+.0f")
            cells.append((title if i == 0 else "", f"{count} of {length} tokens", *means, spread))
    head = ("backbone", "pairs", "without", "with CCQ", "difference in points (range)")
    return table(head, cells)


def draw(found):
    names = titles(found, BACKBONES)
    figure, axes = panels(len(names), height=2.4)
    counts = [count for _, count in TESTS]
    for ax, title in zip(axes, names, strict=True):
        for key, label, colour in ((title, "without", BLUE), (f"CCQ, {title}", "CCQ", ORANGE)):
            band(ax, counts, over_seeds(found, key, "recall"), colour, label, mean=True, lw=1.4)
        ax.set(title=title.replace(" with ", "\n"), xscale="log", ylim=(-0.02, 1.02))
        ticks(ax.xaxis, counts)
        if ax is not axes[0]:
            ax.set_yticklabels([])
    axes[0].set_ylabel("recall")
    axes[len(axes) // 2].set_xlabel("pairs")
    legend_below(figure, axes[0], 2)
    return figure
