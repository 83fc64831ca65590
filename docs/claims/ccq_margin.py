"""The change that CCQ makes to the margin between a target key and a distractor.

With unit keys and a query q, the margin (k★ − k_d)·q changes by λ (k_d − k★)ᵀ Σ q. For Σ = ρ u uᵀ
that is λ ρ (β − α) (u·q), with α = k★·u and β = k_d·u. Here the query equals the target, and the
formula is given the largest eigenvalue of Σ and its vector.
"""

import numpy as np
from drawing import BLUE, GREEN, INK, ORANGE, panels
from recorded import table

import precondattn as pa
from claims.inputs import keys

SMALL = {"tokens": 16}
COLOURS = {
    "a needle off one direction": "#b05fc0",
    "one direction": ORANGE,
    "clustered": GREEN,
    "of a trained model": BLUE,
    "random": INK,
}
ROUNDING = 1e-12


def constructed(kind, tokens):
    """Keys (tokens, 32) of length 1."""
    if kind in ("of a trained model", "clustered", "random"):
        return keys(kind, tokens)
    k = np.zeros((tokens, 32))  # cos θ c ± sin θ u: the covariance is that of the signs.
    k[:, 0] = np.cos(0.6)
    k[:, 1] = np.sin(0.6) * np.random.default_rng(0).choice([-1, 1], size=tokens)
    if kind == "a needle off one direction":
        k[0] = 0
        k[0, 1:3] = 0.1, 1
    return k / np.linalg.norm(k, axis=-1, keepdims=True)


def changed(k, targets):
    """The changes of margins over all keys (targets, tokens), by the library and by the formula.

    Queries equal the keys of the targets, and Σ is the covariance of all keys.
    """
    keys = np.repeat(k[None, :, None], len(targets), axis=0)
    given = k[targets, None, None], keys, targets[:, None], np.full((len(targets), 1, 1), 0.5)
    return [pa.diagnostics.margin_gain(*given, rank_one=x)[:, 0, 0] for x in (False, True)]


def run(tokens=128):
    """The formula's error, the shares of margins that widen, and some pairs, for each kind."""
    found = {}
    for kind in COLOURS:
        k, targets = constructed(kind, tokens), np.arange(1 if "needle" in kind else tokens)
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


def rows(found):
    """The formula's error and the shares of margins that widen."""
    head = ("keys", "error of the formula, of the largest change")
    head += ("margins that widen: over the strongest distractor", "over all")
    cells = []
    for kind, x in found.items():
        shares = (f"{100 * x[y]:.0f} %" for y in ("widened over the strongest", "widened"))
        cells.append((kind, x["error"], *shares))
    return table(head, cells)


def draw(found):
    """The formula against the library; equal on the line."""
    figure, (ax,) = panels(1, height=2.8)
    for kind, colour in COLOURS.items():
        x = found[kind]
        ax.scatter(x["library"], x["formula"], s=8, color=colour, label=kind, alpha=0.7)
    ax.axline((0, 0), slope=1, color=INK, linewidth=0.8)
    ax.set(xlabel="change of the margin by CCQ", ylabel="by the formula")
    ax.legend(fontsize=8)
    return figure
