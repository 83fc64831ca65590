"""Norms of the Jacobians of LUCID's output, with respect to queries and to keys.

LUCID's §3.2 gives the first as `softmax' times P`, and leaves the second out. Logits of softmax are
multiplied by a factor, which makes it one-hot; Φ stays. All norms are of one token's output o_t:
‖∂o_t/∂q_t‖ and ‖∂o_t/∂k‖ for all keys together, times the size of the entries of q and of k.
"""

import numpy as np
from drawing import BLUE, GREEN, INK, ORANGE, clustered, legend_below, panels
from recorded import table

import precondattn as pa
from claims.inputs import real

SMALL = {"factors": (1, 64), "noises": (0.1, 1.0), "tokens": 12, "queries": 2, "heads": 1}
LINES = {
    "queries": BLUE,
    "keys, through softmax": ORANGE,
    "keys, through Φ": GREEN,
    "queries of softmax": INK,
}
WIDTH, CLUSTERS, NOISE, ONE_HOT = 16, 8, 0.3, 1e8


def norms(q, k, v, factor):
    """Medians over the queries of one head, in the order of `LINES`."""
    scale = k.shape[-1] ** -0.5
    base = pa.Softmax(scale=factor * scale)
    lucid = pa.Lucid(base, scale=scale)
    size_q, size_k = (np.sqrt(np.mean(x * x)) for x in (q, k))
    of_queries, of_softmax = (
        size_q * pa.diagnostics.jacobian_norms(attn, q, k, v, of=("q",))["q"]
        for attn in (lucid, base)
    )
    y, through_phi = lucid.solve().vjp(k, v)
    by_softmax = pa.diagnostics.jacobian_norms(base, q, k, y, of=("k",))["k"]
    out, through_values = base.vjp(q, k, y)
    rows = np.eye(out.size).reshape(out.size, *out.shape)  # One output for each row.
    squares = [np.sum(through_phi(through_values(x)["v"])["k"] ** 2) for x in rows]
    by_phi = np.sqrt(np.sum(np.reshape(squares, out.shape), axis=-1))
    of_keys = [size_k * norm for norm in (by_softmax, by_phi)]
    return [float(np.median(x)) for x in (of_queries, *of_keys, of_softmax)]


def artificial(k, queries):
    """Keys of RMS norm 1, which the last queries equal, so that softmax weights tend to one-hot."""
    v = np.random.default_rng(1).normal(size=(*k.shape[:3], 8))
    unit = k / np.sqrt(np.mean(k * k, axis=-1, keepdims=True))
    return unit[:, -queries:], unit, v


def run(
    factors=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    noises=(0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 4.0),
    tokens=64,
    queries=16,
    heads=9,
):
    """Norms by factor and by noise; and of other keys at factor 1 and where softmax is one-hot."""
    rng = np.random.default_rng(0)
    near = artificial(clustered(tokens, WIDTH, CLUSTERS, NOISE), queries)
    by_noise = [artificial(clustered(tokens, WIDTH, CLUSTERS, x), queries) for x in noises]
    kinds = {"clusters, width 16": [near]}
    for d in (16, 64):
        kinds[f"random, width {d}"] = [artificial(rng.normal(size=(1, tokens, 1, d)), queries)]
    q, k, v = real("q", "k", "v")
    of_heads = [[x[:, :, i : i + 1] for x in (q[:, -queries:], k, v)] for i in range(heads)]
    kinds["of a trained model"] = of_heads
    return {
        "factors": list(factors),
        "noises": list(noises),
        "by factor": [norms(*near, x) for x in factors],
        "by noise": [norms(*x, 1) for x in by_noise],
        "one-hot by noise": [norms(*x, ONE_HOT) for x in by_noise],
        "kinds": {
            kind: [[norms(*x, factor) for x in inputs] for factor in (1, ONE_HOT)]
            for kind, inputs in kinds.items()
        },
    }


def rows(found):
    """Medians over tokens, and over the heads of the model with their range."""
    cells = [
        (kind, state, *map(over_heads, np.transpose(heads)))
        for kind, both in found["kinds"].items()
        for state, heads in zip(("as it is", "one-hot"), both, strict=True)
    ]
    return table(("keys", "softmax", *LINES), cells)


def over_heads(norms):
    """The median, and the range if there are several heads."""
    least, middle, most = (f"{x:.2g}" if x > 1e-8 else "0" for x in np.quantile(norms, (0, 0.5, 1)))
    return middle if len(norms) == 1 or most == "0" else f"{middle} ({least} to {most})"


def draw(found):
    """Against the factor of the logits, and against noise: solid as it is, dashed one-hot."""
    figure, axes = panels(2, height=3.1)
    by_factor, by_noise, one_hot = (
        np.transpose(found[x]) for x in ("by factor", "by noise", "one-hot by noise")
    )
    for i, (line, colour) in enumerate(LINES.items()):
        style = "--" if line == "queries of softmax" else "-"
        axes[0].plot(found["factors"], by_factor[i], style, color=colour, label=line)
        axes[1].plot(found["noises"], by_noise[i], style, color=colour)
    axes[1].plot(found["noises"], one_hot[2], ":", color=GREEN, label="one-hot softmax")
    axes[0].set(xscale="log", yscale="log", ylim=(1e-4, 20), xlabel="factor of the logits")
    axes[1].set(xscale="log", xlabel="noise of the clusters", ylim=(0, 3.6))
    axes[0].set_ylabel("norm of the Jacobian")
    axes[1].legend(loc="upper left")
    legend_below(figure, axes[0], 2)
    return figure
