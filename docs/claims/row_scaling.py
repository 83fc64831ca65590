"""Scalings of rows beside Theorem 4.4: the row norm C, the leverage scaling L, and the best found.

For A of n × d, k = min(n, d), and any diagonal G, the page proves

    κ(CA) ≤ ‖CA‖₂ κ(GA) ≤ √n κ(GA),
    μ(CA) ≤ (n / k)^{k/2} μ(GA),
    log μ(LA) ≤ log μ(A) − k/2 KL(ℓ/k ‖ ‖A_i‖² / ‖A‖_F²).

The best κ is found by gradient descent, so it may be above the minimum.
"""

import numpy as np
from drawing import BLUE, INK, ORANGE, panels, ticks
from recorded import table

import precondattn as pa
from claims.inputs import counter_example, drawn, real

SMALL = {"tokens": (6, 24), "width": 4, "draws": 2, "descent": 20}
KINDS = ("random", "values with a mean", "sharp", "causal", "clustered values", "near-singular")


def output(arguments):
    """The outputs of softmax, one (n, d) for each head."""
    return list(np.moveaxis(pa.softmax(**arguments)[0], 1, 0))


def best_kappa(b, descent):
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


def compared(matrices, descent):
    """κ, and falls of log μ, of each matrix: lists by name, of six digits."""
    each = [_compared(a, descent) for a in matrices]
    return {name: [float(f"{x[name]:.6g}") for x in each] for name in each[0]}


def _compared(a, descent):
    kappa, log_mu = pa.diagnostics.condition_number, pa.diagnostics.log_mu
    length = np.linalg.norm(a, axis=1)
    factors = pa.diagnostics.leverage_scaling(a)
    scaled = {"A": a, "C": a / length[:, None], "L": factors[:, None] * a}
    k = min(a.shape)
    new, old = (factors * length) ** 2 / k, length**2 / np.sum(length**2)
    found = {f"kappa {name}": kappa(x).item() for name, x in scaled.items()}
    best = min(best_kappa(scaled["C"], descent), *found.values())
    falls = {f"fall {x}": (log_mu(a) - log_mu(scaled[x])).item() for x in "CL"}
    found |= {**falls, "proved fall": float(k / 2 * np.sum(new * np.log(new / old)))}
    return {**found, "best kappa": best, "proved factor": float(np.linalg.norm(scaled["C"], 2))}


def run(tokens=(16, 32, 64, 128, 256), width=16, draws=10, descent=400):
    """For each kind and number of tokens, the comparisons of all draws."""
    found = {"tokens": list(tokens), "width": width}
    for kind in KINDS:
        for n in tokens:
            of = [output(drawn(kind, n, width, seed))[0] for seed in range(draws)]
            found[f"{kind}, {n}"] = compared(of, descent)
    constructed = [output(counter_example(n, 9))[0] for n in tokens]
    found["counter-example"] = compared(constructed, descent)
    heads = output(dict(zip("qkv", real("q", "k", "v"), strict=True)))
    found["of a trained model"] = compared(heads, descent)
    return found


def rows(found):
    """Shares of draws in which μ rises, and medians of κ over the best found."""
    n = found["tokens"]
    names = [f"{kind}, {x}" for kind in KINDS for x in (n[0], n[-1])]
    head = ("matrix A, tokens", *(f"μ rises, {x}" for x in "CL"))
    head += (*(f"κ / best, {x}" for x in "ACL"), "proved for C")
    cells = []
    for name in (*names, "of a trained model", "counter-example"):
        of = {key: np.array(x) for key, x in found[name].items()}
        # Rounding alone can raise μ by about 1e-10 for matrices with κ near 10⁶.
        rises = [f"{100 * np.mean(of[f'fall {x}'] < -1e-8):.0f} %" for x in "CL"]
        ratios = [float(np.median(of[f"kappa {x}"] / of["best kappa"])) for x in "ACL"]
        cells.append((name, *rises, *ratios, float(np.median(of["proved factor"]))))
    more = [f"{kind}, {x}" for kind in KINDS for x in n if x > found["width"]]
    draws = {key: np.concatenate([found[name][key] for name in more]) for key in found[more[-1]]}
    mu_c, mu_l = (np.sum(draws[f"fall {x}"] < -1e-8) for x in "CL")
    above = draws["kappa A"] * (1 + 1e-6)
    kappa_c, kappa_l = (np.sum(draws[f"kappa {x}"] > above) for x in "CL")
    most = np.max(draws["kappa C"] / draws["best kappa"])
    return (
        f"{table(head, cells)}\n\n"
        f"In the {len(draws['kappa A'])} draws with more tokens than channels, C raises μ in "
        f"{mu_c} and κ in {kappa_c}, and L μ in {mu_l} and κ in {kappa_l}.\n"
        f"There κ of C is at most {most:.2g} times the best found; in the counter-example it is "
        f"√(n − 1) times."
    )


def draw(found):
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
    ticks(left.xaxis, n)
    ticks(left.yaxis, (1, 2, 4, 8, 16))
    right.set(xlabel="proved fall of log μ, for L", ylabel="fall of log μ")
    for colour, label in ((ORANGE, "row norm C"), (BLUE, "leverage scaling L")):
        right.plot([], [], color=colour, linestyle="", marker=".", label=label)
    figure.legend(ncols=2, loc="outside lower center")
    return figure
