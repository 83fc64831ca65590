"""The distance of CCQ's query from Mesa's, of which it is the first-order approximation.

For equal λ and n keys of length 1 and mean 0, so that H = n Σ,

    λ (H + λ I)⁻¹ q = q − H q / λ + H² q / λ² − …

CCQ with the factor n / λ is the first two terms. Mesa's query is computed by the library, and so is
CCQ's; other orders, and the steps of conjugate gradients to the same solution, with NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from make_figures import BLUE, GREEN, INK, ORANGE, clustered, iterates, panels
from matplotlib.figure import Figure

import precondattn as pa
from claims.claim import Claim, table
from precondattn_conformance.inputs import REAL, make_inputs

CLAIM = Claim(
    says="CCQ's query is the first order of Mesa's",
    source="CCQ §3.2, Eq. 9; MesaNet abstract",
    verdict="holds in part",
    because=(
        "For keys of mean 0 the difference falls with λ⁻²: CCQ is the first order exactly. But "
        "its factor is at most 1, so that λ is at least the number of keys. Mesa's smaller λ are "
        "out of its reach: at a tenth of the largest eigenvalue CCQ's query is 64 to 400 % off, "
        "where four to seven steps of conjugate gradients leave 1 %."
    ),
)
SMALL = {"tokens": 24}
"""Arguments of `run` for a test."""
ALT = (
    "Left, the distance to Mesa's query falls with the square of lambda for CCQ, and with lambda "
    "for the query itself. Right, conjugate gradients come below a distance of 0.01 in four to "
    "seven steps."
)
COLOURS = {"random": INK, "clustered": GREEN, "of a trained model": BLUE}
RATIOS = [float(x) for x in np.logspace(-2, 3, 26)]
"""λ as a multiple of the largest eigenvalue of H."""
STEPS = 12
REACHED = 0.01


def keys(kind: str, tokens: int) -> np.ndarray:
    """Keys (tokens, 32) of length 1 and mean 0: half of them, and the same with the other sign."""
    tokens //= 2
    if kind == "of a trained model":
        k = make_inputs(pa.Softmax(), REAL, "real")["k"][0, -tokens:, 0]
    elif kind == "clustered":
        k = clustered(tokens, 32, 8, 0.1)[0, :, 0]
    else:
        k = np.random.default_rng(0).normal(size=(tokens, 32))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    return np.concatenate([k, -k])


def by_library(k: np.ndarray, ridge: float) -> tuple[np.ndarray, np.ndarray]:
    """Queries that equal the keys and attend to all keys, by Mesa times λ and by CCQ."""
    q, keys, n = k[None, None], k[None, :, None], len(k)
    mesa = ridge * pa.MesaQuery()(q, keys, lam_mesa=np.full(k.shape, ridge))
    factor = np.full((1, 1, n), min(1.0, n / ridge))
    return mesa[0, 0], pa.ConditionedQuery(eps=0)(q, keys, contraction=factor)[0, 0]


def distance(x: np.ndarray, mesa: np.ndarray) -> float:
    """‖x − mesa‖ / ‖mesa‖"""
    return float(np.linalg.norm(x - mesa) / np.linalg.norm(mesa))


def run(tokens: int = 128) -> dict[str, Any]:
    """Distances to Mesa's query by λ, and by steps at λ = ‖H‖ / 10, for each kind."""
    found: dict[str, Any] = {}
    for kind in COLOURS:
        k = keys(kind, tokens)
        h = k.T @ k
        largest = float(np.linalg.eigvalsh(h)[-1])
        pairs = [by_library(k, ratio * largest) for ratio in RATIOS]
        ridge = 0.1 * largest
        mesa, _ = by_library(k, ridge)

        def times(p: np.ndarray, h: np.ndarray = h, ridge: float = ridge) -> np.ndarray:
            return p @ h + ridge * p

        found[kind] = {
            "largest": largest,
            "tokens": tokens,
            "ccq": [distance(ccq, exact) for exact, ccq in pairs],
            "query": [distance(k, exact) for exact, _ in pairs],
            "steps": [distance(ridge * x, mesa) for x in iterates(times, k, STEPS)],
        }
    return found


def rows(found: dict[str, Any]) -> str:
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
        steps = next(
            (i for i, error in enumerate(x["steps"], 1) if error < REACHED), f"over {STEPS}"
        )
        there = (float(np.interp(np.log(ratio), np.log(RATIOS), y)) for y in (ccq, query))
        small = float(np.interp(np.log(0.1), np.log(RATIOS), ccq))
        cells.append((kind, float(power), float(ratio), *there, small, steps))
    return table(head, cells)


def draw(found: dict[str, Any]) -> Figure:
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
    handles = left.get_legend_handles_labels()
    figure.legend(*handles, ncols=4, columnspacing=1, loc="outside lower center")
    return figure
