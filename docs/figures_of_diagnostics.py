"""The figures of the page on diagnostics, which `make_figures.py` draws.

Most are of the queries, keys and values of a small trained encoder on 252 tokens of English, nine
heads of three layers.
"""

import numpy as np
from drawing import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    by_row,
    clustered,
    legend_below,
    maps,
    panels,
    ticks,
)

import precondattn as pa
from precondattn_conformance.inputs import CallLayout, make_inputs

DECADES = 10.0 ** np.arange(-7, 0)
LAYERS = {"first layer": BLUE, "third layer": GREEN, "sixth layer": ORANGE}


def _real(tokens: int = 252) -> dict[str, np.ndarray]:
    """q, k and v (1, tokens, 9, 32) of the trained model, in float64."""
    layout = CallLayout("real", b=1, t=252, s=252, h=9, n=9, d=32, e=32)
    inputs = make_inputs(pa.Softmax(causal=False), layout, "real")
    return {name: np.asarray(x, np.float64)[:, :tokens] for name, x in inputs.items()}


def diagnostics_conditioning():
    """κ of each head for three mechanisms, and μ beside κ."""
    figure, (left, right) = panels(2, height=2.5)
    names = {"softmax": BLUE, "row_normalized": ORANGE, "lucid": GREEN}
    for name, colour in names.items():
        base = pa.Softmax(causal=False)
        attn = base if name == "softmax" else pa.mechanisms()[name](base)
        out = np.moveaxis(attn(**_real()), 2, 1)[0]
        kappa, log_mu = pa.diagnostics.condition_number(out), pa.diagnostics.log_mu(out)
        left.plot(range(1, 10), kappa, "o-", color=colour, label=name, markersize=3, linewidth=1)
        right.plot(kappa, log_mu / np.log(10), "o", color=colour, markersize=3)
    left.set(yscale="log", xlabel="head", ylabel="κ", xticks=range(1, 10))
    right.set(xscale="log", xlabel="κ", ylabel="log₁₀ μ")
    line = np.array(right.get_xlim())
    right.plot(line, np.log10(line), color=INK, linewidth=0.8, linestyle="--", label="μ = κ")
    right.legend()
    legend_below(figure, left, 3)
    return figure


def diagnostics_weights():
    """Weights of four compositions, for keys in three clusters."""
    tokens = 24
    k = clustered(tokens, 16, clusters=3, noise=0.4)
    shared = {"q": k, "k": k, "v": k}
    half = np.full((1, tokens, 1), 0.5)
    given = {
        "softmax": shared,
        "lucid": shared,
        "differential": {**shared, "q2": np.roll(k, 1, axis=1), "k2": k, "lam": np.asarray(0.5)},
        "ccq(linear)": {**shared, "contraction": 2 * half},
    }
    return maps(
        {
            text: by_row(pa.diagnostics.weights(pa.parse(text), **x)[0, 0])
            for text, x in given.items()
        },
        signed=True,
    )


def diagnostics_jacobian():
    """Norms of the Jacobian as attention gets sharper: means over tokens."""
    figure, axes = panels(2, height=2.5)
    k = clustered(12, 8, clusters=4, noise=0.3)
    v = np.random.default_rng(1).normal(size=(1, 12, 1, 4))
    factors = np.geomspace(0.25, 32, 15)
    attns = {"softmax": BLUE, "lucid": GREEN, "laser": ORANGE}
    for text, colour in attns.items():
        found = [pa.diagnostics.jacobian_norms(pa.parse(text), x * k, k, v) for x in factors]
        for ax, name in zip(axes, ("q", "k"), strict=True):
            means = [norms[name].mean() for norms in found]
            ax.plot(factors, means, color=colour, label=text)
    for ax, name in zip(axes, ("queries", "keys"), strict=True):
        ax.set(title=f"with respect to {name}", xscale="log", yscale="log")
        ax.set_xlabel("factor of the queries")
        ticks(ax.yaxis, (0.03, 0.1, 0.3, 1, 3))
    axes[0].set_ylabel("norm of the Jacobian")
    legend_below(figure, axes[0], 3)
    return figure


def diagnostics_spectrum():
    """Eigenvalues of the running covariance by token, of a trained head and of random keys."""
    figure, axes = panels(2, height=2.4)
    random = np.random.default_rng(0).normal(size=(1, 252, 1, 32))
    for ax, title, k in zip(
        axes, ("a trained head", "random keys"), (_real()["k"], random), strict=True
    ):
        of = pa.diagnostics.covariance_spectrum(k[:, :, :1])[0, :, 0]
        for i in range(8):
            ax.plot(range(1, 253), of[:, i], color=BLUE, linewidth=1.2, alpha=1 - 0.1 * i)
        ax.plot(range(1, 253), of.sum(-1), color=ORANGE, label="trace")
        ax.set(title=title, xlabel="token", ylim=(0, 1.02))
    axes[0].set_ylabel("eight largest eigenvalues")
    axes[1].legend()
    return figure


def diagnostics_margin():
    """Gains over all keys of queries that equal their target's key, in one head of each layer."""
    figure, (left, right) = panels(2, height=2.5)
    k = _real()["k"]
    targets = np.arange(3, 251, 12)
    for head, (title, colour) in zip((0, 3, 6), LAYERS.items(), strict=True):
        keys, found = k[:, :, head : head + 1], []
        for target in targets:
            given = keys[:, target : target + 1], keys, np.asarray([[target]]), np.ones((1, 1, 1))
            exact, formula = (
                pa.diagnostics.margin_gain(*given, rank_one=x)[0, 0, 0] for x in (False, True)
            )
            found.append(exact)
            left.plot(exact[::36], formula[::36], ".", color=colour, markersize=2)
        right.hist(np.concatenate(found), 60, histtype="step", color=colour, density=True)
        left.plot([], [], ".", color=colour, label=title)
    left.axline((0, 0), slope=1, color=INK, linewidth=0.8)
    left.set(xlabel="gain", ylabel="by Eq. 26")
    right.axvline(0, color=INK, linewidth=0.8)
    right.set(xlabel="gain of the margin", ylabel="density")
    legend_below(figure, left, 3)
    return figure


def diagnostics_probabilities():
    """The share of probabilities below each power of ten, by layer, and the paper's."""
    figure, (ax,) = panels(1, height=2.9)
    a = pa.diagnostics.weights(pa.Softmax(causal=False), **_real())
    below = np.stack([(a[0] < edge).mean(axis=(-2, -1)) for edge in DECADES], axis=-1)
    for i, (title, colour) in enumerate(LAYERS.items()):
        for head in below[3 * i : 3 * i + 3]:
            ax.plot(DECADES, head, color=colour, linewidth=1.2)
        ax.plot([], [], color=colour, label=title)
    ax.plot((1e-7, 1e-3), (0.2, 0.8), "x", color=INK, label="LASER's paper, 2.2 billion parameters")
    ax.set(xscale="log", xlabel="probability", ylabel="share below it", ylim=(0, 1.02))
    figure.legend(ncols=2, loc="outside lower center")
    return figure


def diagnostics_alignment():
    """Alignments of a planted needle and of other keys, and the hits of each head."""
    figure, (left, right) = panels(2, height=2.4)
    k, needle = _planted()
    share = pa.diagnostics.alignment(k)[0]
    bins = np.linspace(0, 1, 41)
    for chosen, colour, label in ((~needle[0], BLUE, "text"), (needle[0], ORANGE, "needle")):
        left.hist(share[chosen].ravel(), bins, color=colour, alpha=0.7, density=True, label=label)
    left.set(xlabel="alignment", ylabel="density")
    left.legend(loc="upper left")
    hits = needle[0][np.argsort(share, axis=0)[: needle.sum()]].mean(axis=0)
    right.bar(range(1, 10), hits, color=ORANGE)
    right.axhline(needle.mean(), color=INK, linewidth=0.8, linestyle="--")
    right.set(xlabel="head", ylabel="hits", ylim=(0, 1.02), xticks=range(1, 10))
    return figure


def _planted() -> tuple[np.ndarray, np.ndarray]:
    """The trained keys, with twelve that are half another and half a random direction."""
    k, needle = _real()["k"].copy(), np.zeros((1, 252), dtype=bool)
    needle[:, 100:112] = True
    random = np.random.default_rng(0).normal(size=(1, 12, 9, 32))
    lengths = (np.linalg.norm(x, axis=-1, keepdims=True) for x in (k[:, 100:112], random))
    random *= np.divide(*lengths)
    k[:, 100:112] += random
    return k, needle
