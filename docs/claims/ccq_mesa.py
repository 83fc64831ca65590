"""The distance of CCQ's query from Mesa's, of which it is the first-order approximation.

For equal λ and n keys of length 1 and mean 0, so that H = n Σ,

    λ (H + λ I)⁻¹ q = q − H q / λ + H² q / λ² − …

CCQ with the factor n / λ is the first two terms. Mesa's query is computed by the library, and so is
CCQ's; other orders, and the steps of conjugate gradients to the same solution, with NumPy.
"""

import numpy as np
from drawing import BLUE, GREEN, INK, ORANGE, iterates, legend_below, panels
from recorded import table

import precondattn as pa
from claims.inputs import keys

SMALL = {"tokens": 24}
COLOURS = {"random": INK, "clustered": GREEN, "of a trained model": BLUE}
RATIOS = [float(x) for x in np.logspace(-2, 3, 26)]
"""λ as a multiple of the largest eigenvalue of H."""
STEPS = 12
REACHED = 0.01


def by_library(k, ridge):
    """Queries that equal the keys and attend to all keys, by Mesa times λ and by CCQ."""
    q, keys, n = k[None, None], k[None, :, None], len(k)
    mesa = ridge * pa.MesaQuery()(q, keys, lam_mesa=np.full(k.shape, ridge))
    factor = np.full((1, 1, n), min(1.0, n / ridge))
    return mesa[0, 0], pa.ConditionedQuery(eps=0)(q, keys, contraction=factor)[0, 0]


def distance(x, mesa):
    """‖x − mesa‖ / ‖mesa‖"""
    return float(np.linalg.norm(x - mesa) / np.linalg.norm(mesa))


def run(tokens=128):
    """Distances to Mesa's query by λ, and by steps at λ = ‖H‖ / 10, for each kind."""
    found = {}
    for kind in COLOURS:
        half = keys(kind, tokens // 2)
        k = np.concatenate([half, -half])  # Their mean is 0.
        h = k.T @ k
        largest = float(np.linalg.eigvalsh(h)[-1])
        pairs = [by_library(k, ratio * largest) for ratio in RATIOS]
        ridge = 0.1 * largest
        mesa, _ = by_library(k, ridge)
        steps = iterates(lambda p, h=h, ridge=ridge: p @ h + ridge * p, k, STEPS)
        found[kind] = {
            "largest": largest,
            "tokens": tokens,
            "ccq": [distance(ccq, exact) for exact, ccq in pairs],
            "query": [distance(k, exact) for exact, _ in pairs],
            "steps": [distance(ridge * x, mesa) for x in steps],
        }
    return found


def rows(found):
    """The order of the difference, distances, and steps."""
    head = (
        "keys",
        "power of λ with which CCQ's distance falls",
        "λ at which CCQ's factor is 1, of ‖H‖",
        "distance there: CCQ",
        "the query itself",
        "at λ = ‖H‖ / 10: CCQ",
        f"steps of conjugate gradients to {100 * REACHED:.0f} %",
    )
    cells = []
    for kind, x in found.items():
        ccq, query, ratio = x["ccq"], x["query"], x["tokens"] / x["largest"]
        power = np.log(ccq[-1] / ccq[-6]) / np.log(RATIOS[-1] / RATIOS[-6])
        below = (i for i, error in enumerate(x["steps"], 1) if error < REACHED)
        steps = next(below, f"over {STEPS}")
        there = (float(np.interp(np.log(ratio), np.log(RATIOS), y)) for y in (ccq, query))
        small = float(np.interp(np.log(0.1), np.log(RATIOS), ccq))
        cells.append((kind, float(power), float(ratio), *there, small, steps))
    return table(head, cells)


def draw(found):
    """Distances by λ, and by steps."""
    figure, (left, right) = panels(2, height=2.6)
    for kind, colour in COLOURS.items():
        x = found[kind]
        left.plot(RATIOS, x["ccq"], color=colour, label=kind)
        left.plot(RATIOS, x["query"], color=colour, ls=":")
        right.plot(range(1, len(x["steps"]) + 1), x["steps"], color=colour)
    left.plot([], [], color=INK, ls=":", label="the query itself")
    left.set(xscale="log", yscale="log", xlabel="λ / ‖H‖", ylabel="distance to Mesa's query")
    right.axhline(REACHED, color=ORANGE, lw=0.7, ls="--")
    right.set(yscale="log", xlabel="steps at λ = ‖H‖ / 10", ylabel="distance")
    legend_below(figure, left, 4, columnspacing=1)
    return figure
