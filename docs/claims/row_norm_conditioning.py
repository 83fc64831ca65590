"""Theorem 4.4 of the row norm: μ(CA) ≤ μ(A), for A = softmax(qkᵀ) v and C = diag(1 / ‖A_i‖).

μ(A) = 2 / (σ₁ ⋯ σ_k) (‖A‖_F / √k)^k with k = min(n, d) bounds the condition number κ = σ₁ / σ_k,
which is what the norm is for. A and CA are the outputs of `softmax` and of `row_normalized`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from make_figures import BLUE, GREEN, INK, ORANGE, panels
from matplotlib.figure import Figure

import precondattn as pa
from claims.claim import Claim, table
from precondattn_conformance.inputs import REAL, make_inputs

CLAIM = Claim(
    says="The row norm improves conditioning: μ(CA) ≤ μ(A), and so κ",
    source="Preconditioned Attention §4.2, Theorem 4.4",
    verdict="holds in part",
    because=(
        "The theorem is false: for normal q, k and v without a mask, 512 tokens and 8 to 128 "
        "channels, μ rises in 80 to 100 % of draws, and κ in 75 to 95 %. With sharp attention or a "
        "causal mask, and tokens many times the channels, κ falls in at least 80 % of draws, at 32 "
        "channels by 13 to 30 %; in 8 of 9 heads of a small trained model, by 3 to 23 %. With as "
        "few tokens as channels μ falls, which can be proved, and κ often rises."
    ),
)
SMALL = {"tokens": (8, 40), "widths": (4,), "draws": 2}
"""Arguments of `run` for a test."""
ALT = (
    "Left, with 512 tokens μ rises in at least 80 % of draws of random values, and in none of "
    "sharp or causal attention. Right, κ falls for these two and stays near 1 for the others."
)
KINDS = {"random": ORANGE, "values with a mean": INK, "sharp": GREEN, "causal": BLUE}
SHOWN = 32
"""The width in the figure."""


def compared(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> tuple[float, float]:
    """log μ(CA) − log μ(A) and κ(CA) / κ(A), for rows (1, n, 1, d)."""
    before, after = (
        np.moveaxis(f(q, k, v, **options), 2, 1) for f in (pa.softmax, pa.row_normalized)
    )
    mu = pa.diagnostics.log_mu(after) - pa.diagnostics.log_mu(before)
    kappa = pa.diagnostics.condition_number(after) / pa.diagnostics.condition_number(before)
    return mu.item(), kappa.item()


def drawn(kind: str, tokens: int, width: int, seed: int) -> tuple[float, float]:
    """One draw of normal q, k and v."""
    q, k, v = np.random.default_rng(seed).normal(size=(3, 1, tokens, 1, width))
    return compared(
        4 * q if kind == "sharp" else q,
        k,
        v + 1 if kind == "values with a mean" else v,
        causal=kind == "causal",
    )


def counter_example() -> tuple[float, float]:
    """Twelve tokens: one attends to itself, the others to one another, and κ(A) = 1."""
    one = np.repeat([[1.0, 0.0], [0.0, 1.0]], [1, 11], axis=0).reshape(1, 12, 1, 2)
    return compared(6 * one, 6 * one, one * [np.sqrt(11), 1], causal=False, scale=1.0)


def of_a_model() -> list[float]:
    """κ(CA) / κ(A) of each head of a small trained language model."""
    inputs = make_inputs(pa.Softmax(), REAL, "real")
    heads = inputs["k"].shape[2]
    return [
        compared(*(np.asarray(inputs[x], np.float64)[:, :, i : i + 1] for x in "qkv"))[1]
        for i in range(heads)
    ]


def run(
    tokens: tuple[int, ...] = (16, 32, 64, 128, 256, 512),
    widths: tuple[int, ...] = (8, SHOWN, 128),
    draws: int = 20,
) -> dict[str, Any]:
    """For each kind and width, by tokens: shares of draws that rise, and quartiles of κ's ratio."""
    found: dict[str, Any] = {"tokens": list(tokens), "widths": list(widths), "draws": draws}
    for kind in KINDS:
        for width in widths:
            of = found.setdefault(f"{kind}, {width}", {"mu": [], "kappa": [], "ratio": []})
            for n in tokens:
                mu, kappa = zip(
                    *(drawn(kind, n, width, seed) for seed in range(draws)), strict=True
                )
                # Rounding alone can raise μ by about 1e-13 if rows have equal lengths.
                of["mu"].append(float(np.mean(np.array(mu) > 1e-9)))
                of["kappa"].append(float(np.mean(np.array(kappa) > 1 + 1e-9)))
                quartiles = np.quantile(kappa, (0.25, 0.5, 0.75))
                of["ratio"].append([round(float(x), 4) for x in quartiles])
    found["counter-example"] = counter_example()
    found["of a trained model"] = of_a_model()
    return found


def rows(found: dict[str, Any]) -> str:
    """Shares of draws that rise, at three lengths."""
    n = found["tokens"]
    shown = sorted({0, len(n) // 2, len(n) - 1})
    head = ("q, k, v", "channels", *(f"{x} rises, {n[i]} tokens" for x in "μκ" for i in shown))
    cells = [
        (kind, width, *(f"{100 * of[x][i]:.0f} %" for x in ("mu", "kappa") for i in shown))
        for kind in KINDS
        for width in found["widths"]
        for of in (found[f"{kind}, {width}"],)
    ]
    mu, kappa = found["counter-example"]
    model = np.array(found["of a trained model"])
    return (
        f"{table(head, cells)}\n\n"
        f"In the counter-example of 12 × 2, μ becomes {np.exp(mu):.2f} times and κ {kappa:.2f} "
        f"times as large.\n"
        f"In a trained model's {len(model)} heads κ becomes {model.min():.2f} to {model.max():.2f} "
        f"times as large."
    )


def draw(found: dict[str, Any]) -> Figure:
    """Shares and ratios of one width; quartiles are shaded."""
    figure, axes = panels(2, height=2.9)
    width = SHOWN if SHOWN in found["widths"] else found["widths"][0]
    for kind, colour in KINDS.items():
        of = found[f"{kind}, {width}"]
        low, middle, high = np.transpose(of["ratio"])
        style = "--" if kind == "causal" else "-"  # Its line lies on another one.
        axes[0].plot(found["tokens"], of["mu"], style, color=colour, marker=".", label=kind)
        axes[1].plot(found["tokens"], middle, color=colour, marker=".")
        axes[1].fill_between(found["tokens"], low, high, color=colour, alpha=0.25, linewidth=0)
    for ax in axes:
        ax.axvline(width, color=INK, linewidth=0.8, linestyle=":")
        ax.set(xscale="log", xlabel=f"tokens, of {width} channels")
        ax.set_xticks(found["tokens"], found["tokens"], minor=False)
        ax.minorticks_off()
    axes[1].axhline(1, color=INK, linewidth=0.8, linestyle="--")
    axes[0].set_ylabel("share of draws where μ rises")
    axes[1].set_ylabel("κ after / κ before")
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=4, loc="outside lower center")
    return figure
