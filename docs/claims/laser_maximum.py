"""Three ways to keep LASER's exponentials in range, with one value far above the others.

Keys are random, values lie in [0, 1), and the last token's value is R. Earlier tokens do not see
it, so that their outputs may not depend on R.

    maximum of all tokens (Algorithm 1):    m + log(A exp(v − m)),  m = max_j v_j
    clamped values:                         log(A exp(15 tanh(v / 15)))
    the library:                            a maximum of what each row sees
"""

from __future__ import annotations

from typing import Any

import numpy as np
from make_figures import BLUE, GREEN, ORANGE, panels
from matplotlib.figure import Figure

import precondattn as pa
from claims.claim import Claim, table

CLAIM = Claim(
    says="Subtracting the largest value of the sequence makes LASER safe",
    source="LASER §3.3, Algorithm 1",
    verdict="does not hold",
    because=(
        "A later value 104 above the earlier ones makes their outputs −∞ in float32, and one 18 "
        "above in float16. Clamped values compute something else, and overflow in float16 from 16 "
        "on. The library's errors on the earlier tokens stay at rounding."
    ),
)
SMALL = {"tokens": 8, "ranges": (8.0, 104.0)}
"""Arguments of `run` for a test."""
ALT = (
    "With the maximum of all tokens, the earlier tokens' error is infinite from a last value of "
    "104 on in float32, and of 18 in float16. The library's error stays at rounding."
)
RANGES = (1.0, 4.0, 8.0, 12.0, 16.0, 18.0, 24.0, 48.0, 80.0, 96.0, 104.0, 160.0)
WAYS = {"maximum of all tokens": ORANGE, "clamped values": GREEN, "the library": BLUE}
DTYPES = ("float32", "float16")


def values(tokens: int, last: float) -> np.ndarray:
    v = np.random.default_rng(1).random((1, tokens, 1, 8))
    v[0, -1] = last
    return v


def by_way(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> dict[str, np.ndarray]:
    """The outputs in the dtype of the inputs."""
    read = pa.Softmax()
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        largest = v.max(axis=1, keepdims=True)
        return {
            "maximum of all tokens": largest + np.log(read(q, k, np.exp(v - largest))),
            "clamped values": np.log(read(q, k, np.exp(15 * np.tanh(v / 15)))),
            "the library": pa.Laser()(q, k, v),
        }


def run(tokens: int = 64, ranges: tuple[float, ...] = RANGES) -> dict[str, Any]:
    """The largest error, against float64, of the tokens that do not see the last, and of all."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, tokens, 1, 16))
    found: dict[str, Any] = {"ranges": list(ranges)}
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


def rows(found: dict[str, Any]) -> str:
    """Errors of the earlier tokens and of the last, at three values of R."""
    shown = [found["ranges"].index(r) for r in (8.0, 18.0, 104.0) if r in found["ranges"]]
    head = ["way", "dtype"]
    head += [f"earlier tokens, R = {found['ranges'][i]:.0f}" for i in shown]
    head += [f"last token, R = {found['ranges'][i]:.0f}" for i in shown]
    cells = []
    for way in WAYS:
        for dtype in DTYPES:
            of = found[f"{way}, {dtype}"]
            errors = [of["earlier"][i] for i in shown] + [of["last"][i] for i in shown]
            cells.append((way, dtype, *errors))
    return table(head, cells)


def draw(found: dict[str, Any]) -> Figure:
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
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=3, loc="outside lower center")
    return figure
