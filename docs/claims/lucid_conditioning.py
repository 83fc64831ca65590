"""The condition number κ₂ of LUCID's matrix E = I + stril(Φ), against the number of tokens.

E⁻¹, which has the same condition number, is the matrix of the weights of the solve. The bound is
κ₂(E) ≤ N √(N + 1), for keys whose Φ has a unit diagonal.
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
    says="Keys of RMS norm 1 give LUCID's matrix a better condition number",
    source="LUCID §3.2, text",
    verdict="holds in part",
    because=(
        "With them κ is at most N √(N + 1) for any keys, which can be proved, and which reaches "
        "the limit of float32 at 41,000 tokens. Up to 1,024 tokens copies of one key come to "
        "1.3 N, the worst head of a trained model to 0.3 N, and random keys stay below 6. Longer "
        "sequences were not measured, and neither were keys that are not normalised."
    ),
)
SMALL = {"lengths": (8, 16)}
"""Arguments of `run` for a test."""
ALT = (
    "Condition numbers grow with tokens and stay below the proved bound. Equal keys have the "
    "largest, then a trained model's, then clustered ones; random keys stay below 6."
)
COLOURS = {"equal": ORANGE, "clustered": GREEN, "of a trained model": BLUE, "random": INK}


def condition_number(k: np.ndarray) -> float:
    """κ₂(E) for keys (1, N, 1, d)."""
    inverse = pa.diagnostics.weights(pa.LucidSolve(), k, v=k)
    return pa.diagnostics.condition_number(inverse).item()


def run(lengths: tuple[int, ...] = (16, 32, 64, 128, 252, 512, 1024)) -> dict[str, Any]:
    """κ₂ for each kind of keys of width 32 and each length."""
    rng = np.random.default_rng(0)
    model = make_inputs(pa.Softmax(), REAL, "real")["k"]
    found: dict[str, Any] = {"tokens": list(lengths)}
    for kind in COLOURS:
        found[kind] = []
        for tokens in lengths:
            if kind == "of a trained model":
                heads = [model[:, :tokens, i : i + 1] for i in range(model.shape[2])]
                enough = tokens <= model.shape[1]
                found[kind].append(max(map(condition_number, heads)) if enough else None)
                continue
            k = {
                "equal": np.ones((1, tokens, 1, 32)),
                "clustered": clustered(tokens, 32, 8, 0.1),
                "random": rng.normal(size=(1, tokens, 1, 32)),
            }[kind]
            found[kind].append(condition_number(k))
    return found


def bound(tokens: Any) -> Any:
    return tokens * np.sqrt(tokens + 1.0)


def rows(found: dict[str, Any]) -> str:
    """κ₂ by length."""
    cells = [
        (
            n,
            *("" if found[kind][i] is None else float(found[kind][i]) for kind in COLOURS),
            float(bound(n)),
        )
        for i, n in enumerate(found["tokens"])
    ]
    return table(("tokens", *COLOURS, "bound"), cells)


def draw(found: dict[str, Any]) -> Figure:
    """κ₂ against N, both logarithmic."""
    figure, (ax,) = panels(1, height=3.0)
    n = np.array(found["tokens"])
    ax.plot(n, bound(n), color=INK, linestyle="--", label="bound")
    for kind, colour in COLOURS.items():
        known = [(x, y) for x, y in zip(n, found[kind], strict=True) if y is not None]
        ax.plot(*zip(*known, strict=True), color=colour, marker=".", label=kind)
    ax.set(xscale="log", yscale="log", xlabel="tokens N", ylabel="condition number")
    figure.legend(ncols=3, loc="outside lower center")
    return figure
