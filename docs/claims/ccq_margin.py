"""The change that CCQ makes to the margin between a target key and a distractor.

With unit keys and a query q, the margin (k★ − k_d)·q changes by λ (k_d − k★)ᵀ Σ q. For Σ = ρ u uᵀ
that is λ ρ (β − α) (u·q), with α = k★·u and β = k_d·u. Here the query equals the target, and the
formula is given the largest eigenvalue of Σ and its vector.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from make_figures import BLUE, GREEN, INK, ORANGE, clustered, panels
from matplotlib.figure import Figure

import precondattn as pa
from claims.claim import Claim, table
from precondattn_conformance.inputs import REAL, make_inputs

CLAIM = Claim(
    says="CCQ widens the margin of a target key over distractors, by λ ρ (β − α)(u·q)",
    source="CCQ Appendix G, Eq. 26",
    verdict="holds in part",
    because=(
        "The formula is exact where the covariance has rank one. The margin over the strongest "
        "distractor widens where the target lies off the direction of variance, which is the case "
        "that the paper derives. Where any token may be the target, most margins shrink: a target "
        "on the directions of variance is contracted more than its distractors."
    ),
)
SMALL = {"tokens": 16}
"""Arguments of `run` for a test."""
ALT = (
    "Change of the margin by the formula against that by the library. Keys of one direction are "
    "on the line where both agree; clustered, trained and random keys are above it, and most of "
    "their margins shrink."
)
COLOURS = {
    "a needle off one direction": "#b05fc0",
    "one direction": ORANGE,
    "clustered": GREEN,
    "of a trained model": BLUE,
    "random": INK,
}
CONTRACTION = 0.5
ROUNDING = 1e-12


def keys(kind: str, tokens: int) -> np.ndarray:
    """Keys (tokens, 32) of length 1."""
    rng = np.random.default_rng(0)
    if kind == "of a trained model":
        k = make_inputs(pa.Softmax(), REAL, "real")["k"][0, -tokens:, 0]
    elif kind == "clustered":
        k = clustered(tokens, 32, 8, 0.1)[0, :, 0]
    elif kind == "random":
        k = rng.normal(size=(tokens, 32))
    else:  # cos θ c ± sin θ u: the covariance is that of the signs.
        k = np.zeros((tokens, 32))
        k[:, 0] = np.cos(0.6)
        k[:, 1] = np.sin(0.6) * rng.choice([-1, 1], size=tokens)
    if kind == "a needle off one direction":
        k[0] = 0
        k[0, 1:3] = 0.1, 1
    return k / np.linalg.norm(k, axis=-1, keepdims=True)


def changed(k: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The changes of margins over all keys (targets, tokens), by the library and by the formula.

    Queries equal the keys of the targets, and Σ is the covariance of all keys.
    """
    keys = np.repeat(k[None, :, None], len(targets), axis=0)
    factor = np.full((len(targets), 1, 1), CONTRACTION)
    given = k[targets, None, None], keys, targets[:, None], factor
    library, formula = (
        pa.diagnostics.margin_gain(*given, rank_one=rank_one)[:, 0, 0] for rank_one in (False, True)
    )
    return library, formula


def run(tokens: int = 128) -> dict[str, Any]:
    """The formula's error, the shares of margins that widen, and some pairs, for each kind."""
    found: dict[str, Any] = {}
    for kind in COLOURS:
        k, targets = keys(kind, tokens), np.arange(1 if "needle" in kind else tokens)
        library, formula = changed(k, targets)
        others = targets[:, None] != np.arange(tokens)
        strongest = np.where(others, k[targets] @ k.T, -np.inf).argmax(axis=1)
        over = library[targets, strongest] > ROUNDING
        all_of, by_formula = library[others], formula[others]
        some = np.random.default_rng(2).choice(len(all_of), min(80, len(all_of)), replace=False)
        found[kind] = {
            "error": float(np.abs(all_of - by_formula).max() / np.abs(all_of).max()),
            "widened": float((all_of > ROUNDING).mean()),
            "widened over the strongest": float(np.mean(over)),
            "library": [round(float(x), 5) for x in all_of[some]],
            "formula": [round(float(x), 5) for x in by_formula[some]],
        }
    return found


def rows(found: dict[str, Any]) -> str:
    """The formula's error and the shares of margins that widen."""
    head = (
        "keys",
        "error of the formula, of the largest change",
        "margins that widen: over the strongest distractor",
        "over all",
    )
    cells = [
        (
            kind,
            x["error"],
            *(f"{100 * x[y]:.0f} %" for y in ("widened over the strongest", "widened")),
        )
        for kind, x in found.items()
    ]
    return table(head, cells)


def draw(found: dict[str, Any]) -> Figure:
    """The formula against the library; equal on the line."""
    figure, (ax,) = panels(1, height=2.8)
    for kind, colour in COLOURS.items():
        x = found[kind]
        ax.scatter(x["library"], x["formula"], s=8, color=colour, label=kind, alpha=0.7)
    ax.axline((0, 0), slope=1, color=INK, linewidth=0.8)
    ax.set(xlabel="change of the margin by CCQ", ylabel="by the formula")
    ax.legend(fontsize=8)
    return figure
