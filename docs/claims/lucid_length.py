"""Does LUCID gain more over softmax in longer contexts, in narrower heads, and without rotation?

Small language models of characters, on the text of `train_a_language_model.md`: two blocks of width
64, with four heads of 16 or one of 64, with and without RoPE, trained on windows of 64 or of 512
characters, 512 of them a step. Softmax and LUCID begin with the same weights and see the same text.
Heads of 16 with RoPE are trained for three times as many steps as well, and with both mechanisms on
the differences of values from one token to the next, a test of what LUCID's gain comes from.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
from drawing import BLUE, GREEN, INK, band, dots, panels
from make_trainings import tutorial
from recorded import table, with_range

from claims.trainings import fit, gaining, means, over_seeds, trained
from precondattn.layers.recipes.projections import Projection, Rotary

SMALL = {"updates": 2, "longer": 3, "seeds": (0,), "lengths": (16, 32), "kept": False}
WIDTH, CHARACTERS = 64, 512
"""The width of the model, and the characters of a training step."""
HEADS, POSITIONS = (16, 64), ("RoPE", "none")
MECHANISMS = ("softmax", "lucid")
DIFFERENCES = {"softmax of differences": "softmax", "LUCID of differences": "lucid"}
"""Titles and mechanisms of the models whose values are differences."""
EVERY = 20
PARTS = 8
"""The number of parts of a context, for each of which a loss is reported."""
PAPER = {"length": 0.048 - 0.012, "head": 0.1 - 0.012, "position": 0.12 - 0.048}
"""The growth of the gain in the paper, in nats per token."""


@dataclass(frozen=True)
class DifferenceOfTokens(Projection):
    """W x of a token minus W x of the token before it."""

    def history(self):
        return 1

    def make(self, tokens, p):
        import torch

        rows = super().make(tokens, p)
        one = torch.ones_like(rows[0, 0])
        return tokens.convolved(rows, torch.stack([-one, one]), None)


def train(seed, name, length, head, positions, updates):
    """Held-out losses of each eighth of the context, and the mean losses of every 20 steps."""
    import torch

    from precondattn.layers.torch import Decoder

    page, row = tutorial(), Rotary() if positions == "RoPE" else Projection()
    recipes = {"q": row, "k": row, **({"v": DifferenceOfTokens()} if name in DIFFERENCES else {})}
    layer = {"mechanism": DIFFERENCES.get(name, name), "recipes": recipes}
    model = Decoder(len(page["alphabet"]), WIDTH, heads=WIDTH // head, layers=[layer] * 2)
    generator = torch.Generator().manual_seed(1 + seed)

    def loss_of():
        count = CHARACTERS // length
        return page["loss"](model, *page["batch"](page["training"], generator, count, length))

    losses = fit(model, 6e-3, updates, loss_of)
    held_out = page["held_out"], torch.Generator().manual_seed(2)
    pairs = [x.split(16) for x in page["batch"](*held_out, 32_768 // length, length)]
    with torch.no_grad():
        found = [
            torch.nn.functional.cross_entropy(model(x).mT, y, reduction="none")
            for x, y in zip(*pairs, strict=True)
        ]
    parts = torch.cat(found).mean(0).reshape(PARTS, -1).mean(1)
    return {"held out": [round(x, 4) for x in parts.tolist()], "losses": means(losses, EVERY)}


def run(updates=240, longer=720, lengths=(64, 512), **options):
    usual = [(*setting, updates) for setting in product(lengths, HEADS, POSITIONS)]
    narrow = [(length, HEADS[0], POSITIONS[0]) for length in lengths]
    settings = [*product(MECHANISMS, [*usual, *((*of, longer) for of in narrow)])]
    settings += product(DIFFERENCES, [(*of, updates) for of in narrow])
    named = {title(name, *setting): (name, *setting) for name, setting in settings}
    found = {"lengths": list(lengths), "steps": [updates, longer]}
    found["characters"] = len(tutorial()["text"])
    return {**found, **trained("lucid_length", train, named, **options)}


def title(name, length, head, positions, steps):
    return f"{name}, {length} characters, heads of {head}, positions {positions}, {steps} steps"


def narrow(found, name, length, steps, what):
    """Losses of heads of 16 with RoPE (seeds, parts or steps)."""
    return over_seeds(found, title(name, length, HEADS[0], POSITIONS[0], steps), what)


def losses(found):
    """Held-out losses of softmax and LUCID (2, lengths, heads, positions, seeds, parts)."""
    settings = [*product(MECHANISMS, found["lengths"], HEADS, POSITIONS)]
    of = [over_seeds(found, title(*setting, found["steps"][0]), "held out") for setting in settings]
    return np.reshape(of, (2, 2, 2, 2, *np.shape(of[0])))


def rows(found):
    """Losses and gains of each setting; and by how much the gain grows with each of the three."""
    (short, long), (few, many) = found["lengths"], found["steps"]
    of_parts = losses(found)
    softmax, lucid = of_parts.mean(-1)
    settings = [(*of, few) for of in product(found["lengths"], HEADS, POSITIONS)]
    pairs = [*zip(*(x.reshape(8, -1) for x in (softmax, lucid)), strict=True)]
    for length in found["lengths"]:
        settings.append((length, HEADS[0], POSITIONS[0], many))
        pairs.append([narrow(found, x, length, many, "held out").mean(-1) for x in MECHANISMS])
    cells = []
    for setting, (one, other) in zip(settings, pairs, strict=True):
        spread = with_range(one - other, "+.3f")
        cells.append(
            (*setting, f"{one.mean():.3f}", f"{other.mean():.3f}", spread, gaining(other - one))
        )
    what = ("characters", "heads of", "positions", "steps")
    head = (*what, "softmax", "LUCID", "gain", "seeds that gain")
    gain = softmax - lucid  # (lengths, heads, positions, seeds)
    length, width, position = (
        gain[1] - gain[0],
        gain[:, 0] - gain[:, 1],
        gain[:, :, 1] - gain[:, :, 0],
    )
    # The paper changes the length and the heads with RoPE, and positions in the longer context.
    grown = (
        (f"{long} characters for {short}", PAPER["length"], length[1, 0], length),
        ("heads of 16 for 64", PAPER["head"], width[0, 0], width),
        ("no positions for RoPE", PAPER["position"], position[1, 1], position),
    )
    changes = [
        (name, f"{paper:+.3f}", *(with_range(x, "+.3f") for x in (same, of.mean((0, 1)))))
        for name, paper, same, of in grown
    ]
    columns = ("the gain grows by", "in the paper", "here, in its setting", "here, in all four")
    one, other = (narrow(found, name, long, many, "held out") for name in MECHANISMS)
    by_place = {
        f"{few}, mean of four": (of_parts[0] - of_parts[1])[1].mean((0, 1, 2)),
        f"{many}, heads of 16, RoPE": (one - other).mean(0),
    }
    places = [(name, *(f"{x:+.3f}" for x in of)) for name, of in by_place.items()]
    ends = (f"to {long * (i + 1) // PARTS}" for i in range(PARTS))
    names = (f"steps; gain in {long} characters", *ends)
    compared = []
    for of in found["lengths"]:
        names_of_all = (*MECHANISMS, *DIFFERENCES)
        plain, *others = (narrow(found, x, of, few, "held out").mean(-1) for x in names_of_all)
        compared.append((of, *(with_range(plain - other, "+.3f") for other in others)))
    whose = ("gain in characters", "LUCID", *DIFFERENCES)
    tables = ((head, cells), (columns, changes), (names, places), (whose, compared))
    return "\n\n".join(table(*of) for of in tables)


def draw(found):
    """Gains by setting, one dot a seed; and by step of the longer trainings."""
    figure, (left, right) = panels(2, height=3.1)
    softmax, lucid = losses(found).mean(-1).reshape(2, 8, -1)
    for i, of in enumerate(softmax - lucid):
        dots(left, of, i, 14)
    left.axvline(0, color=INK, linewidth=0.8)
    names = [f"{of}, {head}, {x}" for of, head, x in product(found["lengths"], HEADS, POSITIONS)]
    left.set(yticks=range(len(names)), yticklabels=names, xlabel="gain of LUCID, held out (nats)")
    left.invert_yaxis()
    for length, colour in zip(found["lengths"], (GREEN, BLUE), strict=True):
        one, other = (narrow(found, x, length, found["steps"][1], "losses") for x in MECHANISMS)
        step = EVERY * (np.arange(one.shape[1]) + 0.5)
        band(right, step, one - other, colour, f"{length} characters", linewidth=1.4)
    right.axhline(0, color=INK, linewidth=0.8)
    right.set(xlabel="step", ylabel="gain in training, heads of 16, RoPE")
    right.legend()
    return figure
