"""Theorem 4.4 of the row norm: μ(CA) ≤ μ(A), for A = softmax(qkᵀ) v and C = diag(1 / ‖A_i‖).

μ(A) = 2 / (σ₁ ⋯ σ_k) (‖A‖_F / √k)^k with k = min(n, d) bounds the condition number κ = σ₁ / σ_k,
which is what the norm is for. A and CA are the outputs of `softmax` and of `row_normalized`.
"""

import numpy as np
from drawing import BLUE, GREEN, INK, ORANGE, legend_below, panels, ticks
from recorded import table

import precondattn as pa
from claims.inputs import counter_example, drawn, real

SMALL = {"tokens": (8, 40), "widths": (4,), "draws": 2}
KINDS = {"random": ORANGE, "values with a mean": INK, "sharp": GREEN, "causal": BLUE}
SHOWN = 32
"""The width in the figure."""


def compared(q, k, v, **options):
    """log μ(CA) − log μ(A) and κ(CA) / κ(A) of each head, for rows (1, n, h, d)."""
    before, after = (
        np.moveaxis(f(q, k, v, **options), 2, 1)[0] for f in (pa.softmax, pa.row_normalized)
    )
    mu = pa.diagnostics.log_mu(after) - pa.diagnostics.log_mu(before)
    return mu, pa.diagnostics.condition_number(after) / pa.diagnostics.condition_number(before)


def run(tokens=(16, 32, 64, 128, 256, 512), widths=(8, SHOWN, 128), draws=20):
    """For each kind and width, by tokens: shares of draws that rise, and quartiles of κ's ratio."""
    found = {"tokens": list(tokens), "widths": list(widths), "draws": draws}
    for kind in KINDS:
        for width in widths:
            of = found.setdefault(f"{kind}, {width}", {"mu": [], "kappa": [], "ratio": []})
            for n in tokens:
                pairs = [compared(**drawn(kind, n, width, seed)) for seed in range(draws)]
                mu, kappa = np.array(pairs)[..., 0].T
                # Rounding alone can raise μ by about 1e-13 if rows have equal lengths.
                of["mu"].append(float(np.mean(mu > 1e-9)))
                of["kappa"].append(float(np.mean(kappa > 1 + 1e-9)))
                quartiles = np.quantile(kappa, (0.25, 0.5, 0.75))
                of["ratio"].append([round(float(x), 4) for x in quartiles])
    found["counter-example"] = [x.item() for x in compared(**counter_example(12, 6))]
    found["of a trained model"] = compared(*real("q", "k", "v"))[1].tolist()
    return found


def rows(found):
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


def draw(found):
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
        ticks(ax.xaxis, found["tokens"])
    axes[1].axhline(1, color=INK, linewidth=0.8, linestyle="--")
    axes[0].set_ylabel("share of draws where μ rises")
    axes[1].set_ylabel("κ after / κ before")
    legend_below(figure, axes[0], 4)
    return figure
