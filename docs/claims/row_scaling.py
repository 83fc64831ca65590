"""Scalings of rows beside Theorem 4.4: the row norm C, the leverage scaling L, and the best found.

For A of n × d, k = min(n, d), and any diagonal G, the page proves

    κ(CA) ≤ ‖CA‖₂ κ(GA) ≤ √n κ(GA),
    μ(CA) ≤ (n / k)^{k/2} μ(GA),
    log μ(LA) ≤ log μ(A) − k/2 KL(ℓ/k ‖ ‖A_i‖² / ‖A‖_F²).

The best κ is found by gradient descent, so it may be above the minimum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from make_figures import BLUE, INK, ORANGE, panels
from matplotlib.figure import Figure

import precondattn as pa
from claims.claim import Claim, table
from precondattn_conformance.inputs import REAL, make_inputs

CLAIM = Claim(
    says="A scaling of the rows never raises μ, and the row norm is within √n of the best κ",
    source="Preconditioned Attention §4.2, Theorem 4.4",
    verdict="holds",
    because=(
        "For any matrix without rows of zeros, scaling each row to the root of its leverage (L) "
        "never raises μ, and the row norm (C) is within √n of the best κ: both are proved below. "
        "Of 240 outputs with more tokens than channels, C raises μ in 70 and κ in 77, L raises μ "
        "in none and κ in 7. With at most as many tokens as channels L is C, and κ may rise."
    ),
)
SMALL = {"tokens": (6, 24), "width": 4, "draws": 2, "descent": 20}
"""Arguments of `run` for a test."""
ALT = (
    "Left, κ of both scalings stays below √n times the best, which only a counter-example comes "
    "near. Right, log μ falls by at least the proved amount for the leverage scaling L, and rises "
    "in some draws for the row norm C."
)
KINDS = ("random", "values with a mean", "sharp", "causal", "clustered values", "near-singular")


def drawn(kind: str, tokens: int, width: int, seed: int) -> np.ndarray:
    """The output (n, d) of softmax for normal q, k and v."""
    rng = np.random.default_rng(seed)
    q, k, v = rng.normal(size=(3, 1, tokens, 1, width))
    if kind == "values with a mean":
        v = v + 1
    elif kind == "clustered values":
        v = v[:, np.arange(tokens) % 4] + 0.01 * v
    elif kind == "near-singular":
        v[..., 0] = v[..., 1] + 1e-3 * v[..., 0]
    out: np.ndarray = pa.softmax(4 * q if kind == "sharp" else q, k, v, causal=kind == "causal")
    return out[0, :, 0]


def counter_example(tokens: int) -> np.ndarray:
    """One token attends to itself, the others to one another, and κ = 1."""
    one = np.repeat([[1.0, 0.0], [0.0, 1.0]], [1, tokens - 1], axis=0).reshape(1, tokens, 1, 2)
    v = one * [np.sqrt(tokens - 1), 1]
    out: np.ndarray = pa.softmax(9 * one, 9 * one, v, causal=False, scale=1.0)
    return out[0, :, 0]


def heads_of_a_model() -> list[np.ndarray]:
    """The output of each head of a small trained language model, for 252 tokens of English."""
    inputs = make_inputs(pa.Softmax(), REAL, "real")
    out = pa.softmax(*(np.asarray(inputs[x], np.float64) for x in "qkv"))
    return list(np.moveaxis(out[0], 1, 0))


def best_kappa(b: np.ndarray, descent: int) -> float:
    """κ of the best scaling found, from rows b of length 1.

    Steps in log G² down a smooth bound of log κ², of σ₁ and σ_k as norms of all σ² and 1 / σ².
    """
    x, best = np.zeros(len(b)), np.inf
    for i in range(descent):
        u, s, _ = np.linalg.svd(np.exp((x - x.max()) / 2)[:, None] * b, full_matrices=False)
        best, power = min(best, s[0] / s[-1]), 4 + 80 * i / descent
        first, last = (s / s[0]) ** power, (s[-1] / s) ** power
        slope = u**2 @ (first / first.sum() - last / last.sum())
        x = x - 0.5 * (1 - i / descent) * slope / max(np.abs(slope).max(), 1e-12)
    return float(best)


def compared(a: np.ndarray, descent: int) -> dict[str, float]:
    """κ, and falls of log μ, of one matrix."""
    kappa, log_mu = pa.diagnostics.condition_number, pa.diagnostics.log_mu
    length = np.linalg.norm(a, axis=1)
    factors = pa.diagnostics.leverage_scaling(a)
    scaled = {"A": a, "C": a / length[:, None], "L": factors[:, None] * a}
    k = min(a.shape)
    new, old = (factors * length) ** 2 / k, length**2 / np.sum(length**2)
    found = {f"kappa {name}": kappa(x).item() for name, x in scaled.items()}
    falls = {f"fall {x}": (log_mu(a) - log_mu(scaled[x])).item() for x in "CL"}
    best = min(best_kappa(scaled["C"], descent), *found.values())
    return (
        found
        | falls
        | {
            "proved fall": float(k / 2 * np.sum(new * np.log(new / old))),
            "best kappa": best,
            "proved factor": float(np.linalg.norm(scaled["C"], 2)),
        }
    )


def run(
    tokens: tuple[int, ...] = (16, 32, 64, 128, 256),
    width: int = 16,
    draws: int = 10,
    descent: int = 400,
) -> dict[str, Any]:
    """For each kind and number of tokens, the comparisons of all draws."""
    found: dict[str, Any] = {"tokens": list(tokens), "width": width}
    for kind in KINDS:
        for n in tokens:
            each = [compared(drawn(kind, n, width, seed), descent) for seed in range(draws)]
            found[f"{kind}, {n}"] = joined(each)
    found["counter-example"] = joined([compared(counter_example(n), descent) for n in tokens])
    found["of a trained model"] = joined([compared(a, descent) for a in heads_of_a_model()])
    return found


def joined(each: list[dict[str, float]]) -> dict[str, list[float]]:
    """Lists by name, of six digits."""
    return {name: [float(f"{x[name]:.6g}") for x in each] for name in each[0]}


def rows(found: dict[str, Any]) -> str:
    """Shares of draws in which μ rises, and medians of κ over the best found."""
    n = found["tokens"]
    names = [f"{kind}, {x}" for kind in KINDS for x in (n[0], n[-1])]
    head = (
        "matrix A, tokens",
        "μ rises, C",
        "μ rises, L",
        *(f"κ / best, {x}" for x in "ACL"),
        "proved for C",
    )
    cells = []
    for name in (*names, "of a trained model", "counter-example"):
        of = {key: np.array(x) for key, x in found[name].items()}
        # Rounding alone can raise μ by about 1e-10 for matrices with κ near 10⁶.
        rises = [f"{100 * np.mean(of[f'fall {x}'] < -1e-8):.0f} %" for x in "CL"]
        ratios = [float(np.median(of[f"kappa {x}"] / of["best kappa"])) for x in "ACL"]
        cells.append((name, *rises, *ratios, float(np.median(of["proved factor"]))))
    more = [f"{kind}, {x}" for kind in KINDS for x in n if x > found["width"]]
    draws = {key: np.concatenate([found[name][key] for name in more]) for key in found[more[-1]]}
    rise = {
        x: (
            np.sum(draws[f"fall {x}"] < -1e-8),
            np.sum(draws[f"kappa {x}"] > draws["kappa A"] * (1 + 1e-6)),
        )
        for x in "CL"
    }
    (mu_c, kappa_c), (mu_l, kappa_l) = rise["C"], rise["L"]
    most = np.max(draws["kappa C"] / draws["best kappa"])
    return (
        f"{table(head, cells)}\n\n"
        f"In the {len(draws['kappa A'])} draws with more tokens than channels, C raises μ in "
        f"{mu_c} and κ in {kappa_c}, and L μ in {mu_l} and κ in {kappa_l}.\n"
        f"There κ of C is at most {most:.2g} times the best found; in the counter-example it is "
        f"√(n − 1) times."
    )


def draw(found: dict[str, Any]) -> Figure:
    """κ over the best against tokens; and the fall of log μ against what is proved."""
    figure, (left, right) = panels(2, height=3.1)
    n = np.array(found["tokens"])
    left.plot(n, np.sqrt(n), color=INK, linestyle="--", label="√n")
    bad = np.divide(found["counter-example"]["kappa C"], found["counter-example"]["best kappa"])
    left.plot(n, bad, color=ORANGE, linestyle="", marker="x", label="counter-example")
    most = 0.0
    for name, of in found.items():
        if not isinstance(of, dict):
            continue
        kind, _, tokens = name.rpartition(", ")
        for x, colour, shift in (("C", ORANGE, 0.94), ("L", BLUE, 1.06)):
            dots = {"color": colour, "linestyle": "", "marker": ".", "markersize": 3}
            if kind:
                ratio = np.divide(of[f"kappa {x}"], of["best kappa"])
                left.plot(np.full(len(ratio), shift * int(tokens)), ratio, **dots)
            right.plot(of["proved fall"], of[f"fall {x}"], **dots)
        most = max(most, *of["proved fall"])
    right.plot([0, most], [0, most], color=INK, linestyle="--")
    right.axhline(0, color=INK, linewidth=0.8)
    left.set(xscale="log", yscale="log", xlabel="tokens", ylabel="κ / best κ found")
    left.set_xticks(n, n)
    left.set_yticks([1, 2, 4, 8, 16], [1, 2, 4, 8, 16])
    left.minorticks_off()
    right.set(xlabel="proved fall of log μ, for L", ylabel="fall of log μ")
    for colour, label in ((ORANGE, "row norm C"), (BLUE, "leverage scaling L")):
        right.plot([], [], color=colour, linestyle="", marker=".", label=label)
    figure.legend(ncols=2, loc="outside lower center")
    return figure
