"""Three ways to keep LASER's exponentials in range, with one value far above the others.

Keys are random, values lie in [0, 1), and the last token's value is R. Earlier tokens do not see
it, so that their outputs may not depend on R.

    maximum of all tokens (Algorithm 1):    m + log(A exp(v − m)),  m = max_j v_j
    clamped values:                         log(A exp(15 tanh(v / 15)))
    the library:                            a maximum of what each row sees
"""

import numpy as np
from drawing import BLUE, GREEN, ORANGE, legend_below, panels
from recorded import table

import precondattn as pa

SMALL = {"tokens": 8, "ranges": (8.0, 104.0)}
RANGES = (1.0, 4.0, 8.0, 12.0, 16.0, 18.0, 24.0, 48.0, 80.0, 96.0, 104.0, 160.0)
WAYS = {"maximum of all tokens": ORANGE, "clamped values": GREEN, "the library": BLUE}
DTYPES = ("float32", "float16")


def values(tokens, last):
    v = np.random.default_rng(1).random((1, tokens, 1, 8))
    v[0, -1] = last
    return v


def by_way(q, k, v):
    """The outputs in the dtype of the inputs."""
    read = pa.Softmax()
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        largest = v.max(axis=1, keepdims=True)
        return {
            "maximum of all tokens": largest + np.log(read(q, k, np.exp(v - largest))),
            "clamped values": np.log(read(q, k, np.exp(15 * np.tanh(v / 15)))),
            "the library": pa.Laser()(q, k, v),
        }


def run(tokens=64, ranges=RANGES):
    """The largest error, against float64, of the tokens that do not see the last, and of all."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, tokens, 1, 16))
    found = {"ranges": list(ranges)}
    for dtype in DTYPES:
        for last in ranges:
            given = [x.astype(dtype) for x in (q, k, values(tokens, last))]
            exact = pa.Laser()(*(x.astype(np.float64) for x in given), backend="reference")
            for way, out in by_way(*given).items():
                error = np.abs(out.astype(np.float64) - exact)
                of = found.setdefault(f"{way}, {dtype}", {"earlier": [], "last": []})
                of["earlier"].append(float(error[:, :-1].max()))
                of["last"].append(float(error[:, -1].max()))
    return found


def rows(found):
    """Errors of the earlier tokens and of the last, at three values of R."""
    shown = [found["ranges"].index(r) for r in (8.0, 18.0, 104.0) if r in found["ranges"]]
    both = {"earlier tokens": "earlier", "last token": "last"}
    head = [f"{title}, R = {found['ranges'][i]:.0f}" for title in both for i in shown]
    cells = []
    for way in WAYS:
        for dtype in DTYPES:
            of = found[f"{way}, {dtype}"]
            cells.append((way, dtype, *(of[x][i] for x in both.values() for i in shown)))
    return table(("way", "dtype", *head), cells)


def draw(found):
    """Errors of the earlier tokens; those of −∞ are at the top."""
    figure, axes = panels(2, height=2.9)
    for ax, dtype in zip(axes, DTYPES, strict=True):
        for way, colour in WAYS.items():
            error = np.array(found[f"{way}, {dtype}"]["earlier"])
            error = np.where(np.isfinite(error), np.maximum(error, 1e-8), 1e3)
            ax.plot(found["ranges"], error, color=colour, marker=".", label=way)
        ax.set(title=dtype, yscale="log", xlabel="value of the last token", ylim=(1e-8, 3e3))
        ax.set_yticks([1e-8, 1e-6, 1e-4, 1e-2, 1, 1e3], ["1e-8", "1e-6", "1e-4", "0.01", "1", "∞"])
    axes[0].set_ylabel("error of the earlier tokens")
    legend_below(figure, axes[0], 3)
    return figure
