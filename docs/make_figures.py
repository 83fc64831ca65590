"""`python docs/make_figures.py` draws the figures of mechanisms, diagnostics and the first pages.

Curves and maps are outputs of `precondattn` in float64 on seeded inputs; times are saved ones. Each
function draws the figure of its name.
"""

import sys
from inspect import isfunction

import drawing
import figures_of_diagnostics
import numpy as np
from drawing import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    by_row,
    clustered,
    identity,
    iterates,
    maps,
    panels,
    weights,
)
from make_performance import load_curves
from matplotlib.figure import Figure

import precondattn as pa
from precondattn_conformance.bench.plot import ratios_to_plain


def front():
    """Two maps of weights on clustered keys, and times beside plain attention."""
    curves = ratios_to_plain(load_curves()["cpu_2_cores_torch"].rows)["forward"]
    figure = Figure(figsize=(7.2, 2.5), layout="constrained")
    softmax, lucid, times = figure.subplots(1, 3, width_ratios=(1, 1, 1.6))
    k = clustered(24, 16, clusters=3, noise=0.4)
    shown = {softmax: ("softmax attention", pa.Softmax()), lucid: ("LUCID", pa.Lucid())}
    for ax, (title, attn) in shown.items():
        ax.imshow(by_row(weights(attn, k, k)), cmap="RdBu_r", vmin=-1, vmax=1)
        ax.set(title=title, xlabel="token that is read", xticks=[], yticks=[])
    softmax.set_ylabel("query")
    times.axhline(1, color=INK, linewidth=1)
    colours = {"lucid": (ORANGE, 4), "path": (BLUE, -4), "gated_delta": (GREEN, 0)}
    for mechanism, (colour, shift) in colours.items():  # A label is so far above its curve's end.
        points = dict(curves[mechanism])
        times.plot([*points], [*points.values()], color=colour, marker="o", markersize=3)
        times.annotate(
            mechanism, (last := max(points), points[last]), (8, shift),
            textcoords="offset points", va="center", color=colour,
        )  # fmt: skip
    times.text(1_150_000, 0.9, "plain attention", color=INK, fontsize=8, ha="right", va="top")
    times.set(
        title="time, plain attention = 1 (CPU)", xlabel="tokens", xscale="log", yscale="log",
        xlim=(400, 1_200_000), xticks=[512, 2048, 8192, 32768],
        xticklabels=["512", "2k", "8k", "32k"],
        yticks=[0.03, 0.1, 0.3, 1, 3, 10], yticklabels=["0.03", "0.1", "0.3", "1", "3", "10"],
    )  # fmt: skip
    times.minorticks_off()
    times.spines[["top", "right"]].set_visible(False)
    return figure


def softmax():
    q, k = np.random.default_rng(0).normal(size=(2, 1, 24, 1, 16))
    bases = {
        "softmax": pa.Softmax(),
        "window=6": pa.Softmax(window=6),
        "causal=False": pa.Softmax(causal=False),
    }
    return maps({title: weights(base, 2 * q, k) for title, base in bases.items()})


def lucid():
    k = clustered(24, 16, clusters=3, noise=0.4)
    attns = {"softmax": pa.Softmax(), "lucid": pa.Lucid()}
    return maps({title: by_row(weights(attn, k, k)) for title, attn in attns.items()}, signed=True)


def laser():
    figure, axes = panels(2)
    v = np.linspace(-6, 12, 73)
    values = np.stack([v, np.zeros_like(v)]).reshape(1, 2, 1, -1)
    for ax, share in zip(axes, (0.1, 0.001), strict=True):
        k = np.asarray([np.log(share / (1 - share)), 0.0]).reshape(1, 2, 1, 1)
        q = np.ones((1, 1, 1, 1))
        for attn, colour in ((pa.Laser(), BLUE), (pa.Softmax(), ORANGE)):
            ax.plot(v, attn(q, k, values)[0, 0, 0], color=colour, label=attn.name)
        ax.set(title=f"weight {share}", xlabel="the key's value")
    axes[0].set_ylabel("output")
    axes[0].legend()
    return figure


def differential():
    tokens = 24
    axes = np.eye(tokens)
    k = 2.2 * axes.reshape(1, tokens, 1, tokens)
    sink = np.broadcast_to(axes[0], (tokens, tokens))  # The first token attracts both maps.
    wanted = axes[np.maximum(np.arange(tokens) - 3, 0)]
    noise = 0.4 * np.random.default_rng(0).normal(size=(tokens, tokens))
    q = 2.2 * (wanted + sink + noise).reshape(1, tokens, 1, tokens)
    q2 = 2.2 * (sink + noise).reshape(1, tokens, 1, tokens)
    attn, base = pa.Differential(pa.Softmax(scale=1.0)), pa.Softmax(scale=1.0)
    return maps(
        {
            "first map": weights(base, q, k),
            "second map": weights(base, q2, k),
            "difference, λ = 0.5": weights(attn, q, k, q2=q2, k2=k, lam=np.asarray(0.5)),
        },
        signed=True,
    )


def ccq():
    figure, (ax,) = panels(1, height=2.5)
    tokens = 240
    rng = np.random.default_rng(0)
    angle = np.pi / 5 + 0.35 * rng.normal(size=tokens) + np.pi * rng.integers(0, 2, size=tokens)
    k = np.stack([np.cos(angle), np.sin(angle)], axis=-1).reshape(1, tokens, 1, 2)
    turn = np.linspace(0, 2 * np.pi, 121)
    circle = np.stack([np.cos(turn), np.sin(turn)], axis=-1)
    ends = np.broadcast_to(k, (121, tokens, 1, 2))
    full = np.full((121, 1, 1), 0.9)
    contracted = pa.ConditionedQuery()(circle.reshape(121, 1, 1, 2), ends, contraction=full)
    x, y = contracted[:, 0, 0].T
    spread = (1 + 0.08 * rng.normal(size=tokens))[:, None] * k[0, :, 0]  # Separates the points.
    ax.scatter(*spread.T, s=5, color=INK, alpha=0.6, label="keys")
    ax.plot(*circle.T, color=ORANGE, label="queries q̄")
    ax.plot(x, y, color=BLUE, label="contracted, λ = 0.9")
    ax.set(aspect="equal", xticks=[], yticks=[])
    ax.spines[:].set_visible(False)
    ax.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure


def row_normalized():
    figure, axes = panels(2, height=2.5)
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 64, 1, 2))
    attns = {"softmax": pa.Softmax(), "row_normalized": pa.RowNormalized()}
    for ax, (title, attn) in zip(axes, attns.items(), strict=True):
        ax.scatter(*attn(q, k, v)[0, :, 0].T, s=9, color=BLUE)
        ax.set(title=title, aspect="equal", xlim=(-1.3, 1.3), ylim=(-1.3, 1.3))
    return figure


def bidirectional():
    rng = np.random.default_rng(0)
    q = np.ones((1, 16, 1, 4))
    k = q / 2 + rng.normal(size=q.shape) / 8
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    gates = {"g": np.full((1, 16, 1), -0.2), "beta": np.full((1, 16, 1), 0.2)}
    shown = ("gated_delta", "bidirectional(gated_delta)")
    return maps({each: weights(pa.parse(each), q, k, **gates) for each in shown}, signed=True)


def query_side():
    figure, axes = panels(2)
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 24, 1, 16))

    def largest_first(attn: pa.Mechanism, q: np.ndarray, **inputs: np.ndarray) -> np.ndarray:
        return np.sort(weights(attn, q, k, **inputs)[-1])[::-1]

    for tau, colour in ((0.5, BLUE), (1.0, GREEN), (2.0, ORANGE)):
        row = largest_first(pa.Temperature(), q, tau=np.asarray(tau))
        axes[0].plot(np.arange(1, 25), row, color=colour, label=f"τ = {tau}")
    axes[0].set(title="temperature", xlabel="key, by weight", ylabel="weight", ylim=(0, 1))
    for attn, colour in ((pa.Softmax(), ORANGE), (pa.QKNorm(), BLUE)):
        sizes = np.geomspace(0.1, 10, 41)
        heaviest = [largest_first(attn, size * q)[0] for size in sizes]
        axes[1].semilogx(sizes, heaviest, color=colour, label=attn.name)
    axes[1].set(title="largest weight", xlabel="factor of the query", ylim=(0, 1))
    for ax in axes:
        ax.legend()
    return figure


def feature_maps():
    figure, axes = panels(2)
    x = np.linspace(-4, 3, 141)
    rows = x.reshape(1, -1, 1, 1)
    axes[0].plot(x, pa.EluPlusOne()(rows).ravel(), color=BLUE)
    axes[0].set(title="elu1", xlabel="x")
    one, zero = np.ones((1, 1)), np.zeros(1)
    features = pa.HedgehogMap()(rows, weight=one, bias=zero)[0, :, 0]
    for feature, colour, label in zip(features.T, (BLUE, ORANGE), ("first", "second"), strict=True):
        axes[1].plot(x, feature, color=colour, label=label)
    axes[1].set(title="hedgehog, d = 1", xlabel="x")
    axes[1].legend()
    return figure


def path():
    tokens = 24
    along = np.zeros((1, tokens, 1, 4))
    along[..., 0] = 1.0
    drawn = {}
    for strength in (0.0, 1.0, 2.0):
        beta = np.zeros((1, tokens, 1))
        beta[0, tokens // 2, 0] = strength
        title = f"β = {strength:.0f} at one token"
        drawn[title] = by_row(weights(pa.Path(scale=1.0), along, along, w=along, beta=beta))
    return maps(drawn)


def linear():
    tokens = 24
    rng = np.random.default_rng(0)
    one = np.ones((1, tokens, 1, 1))
    gate = np.where(rng.uniform(size=(1, tokens, 1)) < 0.15, -1.5, -0.05)
    return maps(
        {
            "linear": weights(pa.Linear(scale=1.0), one, one),
            "retention": weights(pa.Retention(scale=1.0), one, one),
            "ssd": weights(pa.SSD(), one, one, g=gate),
        }
    )


def delta():
    figure, (ax,) = panels(1, height=2.0)
    written = np.asarray([1.0, 1.0, 3.0, 3.0, 3.0, 2.0, 2.0, -1.0, -1.0, 1.0])
    tokens = len(written)
    same = np.ones((1, tokens, 1, 1))
    v, beta = written.reshape(1, tokens, 1, 1), np.ones((1, tokens, 1))
    time = np.arange(1, tokens + 1)
    additive = pa.Linear(scale=1.0)(same, same, v).ravel()
    for row, label, style in (
        (additive, "linear", {"color": ORANGE}),
        (pa.Delta(scale=1.0)(same, same, v, beta=beta).ravel(), "delta, β = 1", {"color": BLUE}),
        (written, "value written", {"color": INK, "ls": "none", "marker": "o", "ms": 5}),
    ):
        ax.plot(time, row, label=label, **style)
    ax.set(xlabel="token, all with the same key", ylabel="value read", xticks=time)
    ax.legend(loc="upper left")
    return figure


def general_delta():
    """The value 1, stored under the key k, after a token that erases with p."""
    figure, (ax,) = panels(1, height=1.9)
    angles = np.linspace(0, np.pi, 91)
    key = np.broadcast_to(np.asarray([1.0, 0.0]), (91, 2, 1, 2))
    p = np.stack([key[:, 0, 0], np.stack([np.cos(angles), np.sin(angles)], axis=-1)], axis=1)
    v = np.broadcast_to(np.asarray([1.0, 0.0]).reshape(1, 2, 1, 1), (91, 2, 1, 1))
    x = {"p": p[:, :, None], "beta": np.ones((91, 2, 1))}
    x["g"] = np.broadcast_to(np.log(np.asarray([1.0, 0.5])).reshape(1, 2, 1), (91, 2, 1))
    for erases, color in (("undecayed", BLUE), ("decayed", ORANGE)):
        read = pa.Comba(scale=1.0, erases=erases)(key, key, v, **x)[:, 1, 0, 0]
        ax.plot(np.degrees(angles), read, label=f"erases={erases}", color=color)
    ax.axhline(0.5, color=INK, lw=0.7, ls="--")
    ax.set(
        xlabel="angle between k and p, in degrees", ylabel="value read", xticks=range(0, 181, 45)
    )
    ax.legend(loc="upper left")
    return figure


def atk():
    figure, (ax,) = panels(1, height=1.9)
    squares = np.logspace(-6, 1, 200)
    k, none = np.ones((200, 1, 1, 1)), np.zeros((200, 1, 1))
    key = pa.PreconditionedKey()
    cache = key.init_cache(k, g_atk=none, beta_atk=none)
    (name,) = cache.store
    cache = cache._replace(store={name: squares.reshape(200, 1, 1)})
    factor, _ = key.extend(cache, k, g_atk=none, beta_atk=none)
    ax.plot(squares, factor.ravel(), color=BLUE)
    ax.axhline(1.0, color=INK, lw=0.7, ls="--")
    ax.set(xscale="log", xlabel="A, the decaying sum of squared keys", ylabel="factor m")
    return figure


def stable_step():
    figure, (ax,) = panels(1, height=1.9)
    c = np.linspace(0, 5, 201)
    ones = np.ones((1, 201, 1, 1))
    ax.plot(c, 1 - c, label="without", color=INK, lw=0.9)
    for rule, color in (("implicit", BLUE), ("exact", ORANGE)):
        step = pa.StableBeta(rule=rule)(ones, beta=c.reshape(1, 201, 1))
        ax.plot(c, 1 - step.ravel(), label=rule, color=color)
    ax.axhline(-1.0, color=INK, lw=0.7, ls="--")
    ax.set(xlabel="c = β ‖k‖²", ylabel="factor along k", ylim=(-2.1, 1.1))
    ax.legend()
    return figure


def mesa():
    figure, (left, right) = panels(2)
    tokens, d = 48, 32
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 1, tokens, 1, d)) / np.sqrt(d)
    k, linear = k + 0.3 / np.sqrt(d), pa.Linear(scale=1)
    k = k / np.linalg.vector_norm(k, axis=-1, keepdims=True)

    def error(out: np.ndarray) -> float:
        """The distance to the values of the last tokens, at the best factor."""
        o, values = out[0, -8:, 0], v[0, -8:, 0]
        factor = np.sum(o * values) / np.sum(o * o)
        return float(np.linalg.norm(factor * o - values) / np.linalg.norm(values))

    steps = list(range(1, 13))
    for ridge, colour in ((0.01, BLUE), (0.1, ORANGE), (1.0, GREEN)):
        queries = iterates(lambda p, ridge=ridge: linear(p, k, k) + ridge * p, k, len(steps))
        errors = [error(linear(q, k, v)) for q in queries]
        left.plot(steps, errors, color=colour, label=f"λ = {ridge:g}")
    left.set(xlabel="iterations", ylabel="error of retrieval", ylim=(0, 1))
    left.legend()
    ridges = np.logspace(-2, 2, 30)
    exact = [error(pa.Mesa(linear)(k, k, v, lam_mesa=np.full((1, d), x))) for x in ridges]
    right.plot(ridges, exact, color=BLUE, label="mesa")
    one = np.ones((1, tokens, 1))
    right.axhline(error(pa.CCQ(linear)(k, k, v, contraction=one)), color=ORANGE, label="ccq")
    right.axhline(error(linear(k, k, v)), color=INK, ls="--", label="linear")
    right.set(xscale="log", xlabel="λ", ylim=(0, 1))
    right.legend()
    return figure


def gsa():
    figure, (ax,) = panels(1, height=1.9)
    tokens, slots = 32, 6
    rng = np.random.default_rng(0)
    logits = 4 * rng.normal(size=(1, tokens, 1, slots)) + 4
    g = -np.logaddexp(0.0, -logits)  # log σ
    s = -np.expm1(g)
    q, k = rng.normal(size=(2, 1, tokens, 1, 4))
    inputs = {"q": q, "k": k, "v": identity(tokens), "s": s, "g": g}
    _, cache = pa.GSA().extend(pa.GSA().init_cache(**inputs), **inputs)
    held = cache.store["gsa.values(v, s, g)"][0, 0]
    image = ax.imshow(held, cmap="viridis", vmin=0, aspect="auto", interpolation="nearest")
    ax.set(title="state after 32 tokens", xlabel="token", ylabel="slot", xticks=[], yticks=[])
    figure.colorbar(image, ax=ax).outline.set_visible(False)
    return figure


def mlstm():
    figure, (ax,) = panels(1, height=2.1)
    tokens = 48
    rng = np.random.default_rng(3)
    i = rng.normal(size=(1, tokens, 1))
    i[0, [12, 30], 0] += (7.0, 14.0)
    g = -np.logaddexp(0.0, -2 - rng.normal(size=(1, tokens, 1)))  # log σ
    ones, m = np.ones((1, tokens, 1, 1)), pa.MLSTM(scale=1, eps=0)
    cache, maxima, sums = m.init_cache(ones, ones, ones, g=g, i=i), [], []
    for t in range(tokens):
        one = slice(t, t + 1)
        rows = (ones[:, one],) * 3
        _, cache = m.extend(cache, *rows, g=g[:, one], i=i[:, one])
        _, mass, maximum = (array.item() for array in cache.store.values())
        maxima.append(maximum)
        sums.append(maximum + np.log(mass))
    ax.plot(i.ravel(), ".", color=INK, label="input gate i")
    ax.plot(sums, color=ORANGE, label="log of the sum")
    ax.plot(maxima, color=BLUE, label="maximum m")
    ax.set(xlabel="token", ylabel="logarithm")
    ax.legend(loc="upper left")
    return figure


def deltaformer():
    figure, axes = panels(2, height=2.5)
    tokens, d = 24, 8
    rng = np.random.default_rng(0)
    k = rng.normal(size=(6, d))[rng.integers(6, size=tokens)]
    q = k + 0.3 * rng.normal(size=(tokens, d))
    unit = np.sqrt(d) * k / np.linalg.vector_norm(k, axis=-1, keepdims=True)
    correlation = np.tril(np.exp((unit @ unit.T - d) / np.sqrt(d)), -1)
    before = np.tril(np.ones((tokens, tokens), dtype=bool), -1)
    weights = np.where(before, np.exp(q @ k.T / np.sqrt(d)), 0.0)
    weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
    titles = ("LUCID: Φ,\nsimilar keys", "DeltaFormer: P,\nwhat a query reads")
    for ax, matrix, title in zip(axes, (correlation, weights), titles, strict=True):
        image = ax.imshow(matrix, cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
        ax.set(title=title, xlabel="earlier token", ylabel="token", xticks=[], yticks=[])
        figure.colorbar(image, ax=ax).outline.set_visible(False)
    return figure


def cross_covariance():
    rng = np.random.default_rng(0)
    k = rng.normal(size=(1, 200, 1, 12))
    q = k[..., rng.permutation(12)] + rng.normal(size=k.shape)
    v = np.concatenate([np.eye(12), np.zeros((188, 12))]).reshape(k.shape)
    factors = {f"γ = {factor}": np.asarray([float(factor)]) for factor in (1, 4, 16)}
    attn = pa.CrossCovariance()
    outs = {title: attn(q, k, v, logit_scale=factor) for title, factor in factors.items()}
    shown = {title: out[0, :12, 0].T for title, out in outs.items()}
    return maps(shown, row="channel of q", column="channel of k")


def nystrom():
    k = np.repeat(np.random.default_rng(0).normal(size=(1, 6, 1, 16)), 4, axis=1)
    k = k + 0.3 * np.random.default_rng(1).normal(size=k.shape)
    attns = {"softmax": pa.Softmax(causal=False)}
    attns |= {f"landmarks={n}": pa.Nystrom(n) for n in (6, 3)}
    return maps({title: weights(attn, k, k) for title, attn in attns.items()}, signed=True)


def windowed():
    figure, axes = panels(2, height=2.3)
    for ax, shift in zip(axes, (0, 2), strict=True):
        attn = pa.Windowed(size=4, shift=shift, grid=(8, 8))
        zeros = np.zeros((1, 64, 1, 4))
        same = weights(attn, zeros, zeros) > 0
        first = same.argmax(axis=1)  # The first token of each window.
        number = np.unique(first, return_inverse=True)[1].reshape(8, 8)
        ax.imshow(number, cmap="tab10", vmin=0, vmax=9, interpolation="nearest")
        ax.set(title=f"shift={shift}", xticks=[], yticks=[])
    return figure


def outlook():
    figure, axes = panels(2, height=2.3)
    attn, noise = pa.Outlook(size=3, grid=(7, 7)), np.random.default_rng(0)
    titled = {"equal logits": 0.0, "random logits": 3.0}
    for ax, (title, factor) in zip(axes, titled.items(), strict=True):
        logits = factor * noise.normal(size=(1, 49, 1, 9, 9))
        read = attn(logits * 7, identity(49))[0, 24, 0].reshape(7, 7)  # s is 1/7.
        image = ax.imshow(read, cmap="viridis", vmin=0, interpolation="nearest")
        ax.set(title=title, xticks=[], yticks=[])
        figure.colorbar(image, ax=ax, ticks=(0, 0.5, 1)).outline.set_visible(False)
    return figure


def channel():
    figure, (ax,) = panels(1)
    tokens, d = np.asarray([16, 64, 256, 1024, 4096]), 16
    for scale_by, color in (("width", ORANGE), ("tokens", BLUE)):
        attn, largest = pa.Channel(scale_by=scale_by), []
        for t in tokens:
            q, k = np.random.default_rng(t).normal(size=(2, 1, t, 1, d))
            v = np.zeros((1, t, 1, d))
            v[0, :d, 0] = np.eye(d)
            largest.append(attn(q, k, v)[0, :d, 0].max(axis=0).mean())
        ax.plot(tokens, largest, color=color, label=f"scale_by={scale_by}")
    ax.axhline(1 / d, color=INK, linewidth=0.8, linestyle=":")
    ax.set(xlabel="tokens", ylabel="largest weight of a row", xscale="log", ylim=(0, 1.05))
    ax.legend()
    return figure


if __name__ == "__main__":
    for module in (sys.modules[__name__], figures_of_diagnostics):
        for name, draw in dict(vars(module)).items():
            if isfunction(draw) and draw.__module__ == module.__name__ and name[0] != "_":
                drawing.save(name, draw, transparent=True)
