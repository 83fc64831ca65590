"""Do PaTH and the delta rule track a state that every token changes, and on longer sequences?

    parity    tokens 0 and 1; after each one, whether there was an even number of 1
    swaps     tokens that exchange two of three things; after each one, which of the 6 orders

A decoder of one block is trained on 16 tokens, with a loss at each, and tested on 64. With β in
(0, 2), a transition I − β k kᵀ can be a reflection; with β in (0, 1) it can only shrink.
"""

from functools import partial
from itertools import permutations

import numpy as np
from drawing import BLUE, GREEN, INK, ORANGE, band, legend_below, panels
from recorded import table, with_range

from claims.trainings import cross_entropy, fit, over_seeds, trained

SMALL = {"updates": 2, "seeds": (0,), "size": 4, "kept": False}
LENGTH, TESTED = 16, 64
MECHANISMS = {
    "PaTH": ("path", None, BLUE),
    "delta, β < 2": ("delta", 2.0, ORANGE),
    "gated delta, β < 2": ("gated_delta", 2.0, "#b05fc0"),
    "delta, β < 1": ("delta", None, GREEN),
    "softmax": ("softmax", None, INK),
}
TASKS = ("parity", "swaps")
SETTINGS = {f"{t}, {m}": (t, *MECHANISMS[m][:2]) for m in MECHANISMS for t in TASKS}
ORDERS = list(permutations(range(3)))
SWAPS = (ORDERS.index((1, 0, 2)), ORDERS.index((0, 2, 1)), ORDERS.index((2, 1, 0)))


def tables(task):
    """The state after each token, (states, tokens), and the tokens that occur."""
    if task == "parity":
        return np.array([[0, 1], [1, 0]]), (0, 1)
    after = [[ORDERS.index(tuple(a[i] for i in b)) for b in ORDERS] for a in ORDERS]
    return np.array(after), SWAPS


def batch(task, count, length):
    """Tokens (count, 1 + length), which begin with one of their own, and states (count, length)."""
    import torch

    after, occur = tables(task)
    tokens = torch.tensor(occur)[torch.randint(len(occur), (count, length))]
    states, state = [], torch.zeros(count, dtype=torch.long)
    for i in range(length):
        state = torch.from_numpy(after)[state, tokens[:, i]]
        states.append(state)
    first = torch.full((count, 1), len(after))
    return torch.cat([first, tokens], 1), torch.stack(states, 1)


def train(seed, task, name, top, updates, size):
    """The accuracy at each position of 256 longer sequences."""
    import torch

    from precondattn.layers.recipes.gates import Sigmoid
    from precondattn.layers.torch import Decoder

    layer = {"mechanism": name, **({"recipes": {"beta": Sigmoid(top)}} if top else {})}
    model = Decoder(len(tables(task)[0]) + 1, 32, heads=4, layers=[layer])

    def loss_of():
        tokens, states = batch(task, size, LENGTH)
        return cross_entropy(model(tokens)[:, 1:], states)

    losses = fit(model, 5e-3, updates, loss_of)
    with torch.no_grad():
        tokens, states = batch(task, 4 * size, TESTED)
        right = model(tokens)[:, 1:].argmax(-1) == states
    return {"loss": losses[-1], "right": [round(x, 4) for x in right.float().mean(0).tolist()]}


run = partial(trained, "state_tracking", train, SETTINGS, updates=800, size=64)


def rows(found):
    """Accuracies of three ranges of positions: the median of seeds, with the least and largest."""
    cells = []
    for task in TASKS:
        for title in MECHANISMS:
            of = over_seeds(found, f"{task}, {title}", "right")
            parts = [100 * of[:, a:b].mean(1) for a, b in ((0, 16), (16, 32), (32, 64))]
            spread = [with_range(x, ".0f", unit=" %", middle=np.median(x)) for x in parts]
            cells.append((task, title, *spread))
    return table(("task", "mechanism", "tokens 1 to 16", "17 to 32", "33 to 64"), cells)


def draw(found):
    figure, axes = panels(2, height=3.1)
    position = np.arange(1.5, TESTED + 1, 2)  # Two at a time: swaps alternate between two halves.
    for ax, task in zip(axes, TASKS, strict=True):
        for title, (_, _, colour) in MECHANISMS.items():
            of = over_seeds(found, f"{task}, {title}", "right")
            band(ax, position, of.reshape(len(of), -1, 2).mean(2), colour, title, linewidth=1.4)
        ax.axvline(LENGTH, color=INK, linewidth=0.8, linestyle=":")
        ax.set(title=task, xlabel="position", ylim=(0, 1.02))
    axes[0].set_ylabel("accuracy")
    legend_below(figure, axes[0], 3)
    return figure
