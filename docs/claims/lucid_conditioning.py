"""The condition number κ₂ of LUCID's matrix E = I + stril(Φ), against the number of tokens.

E⁻¹, which has the same condition number, is the matrix of the weights of the solve. The bound is
κ₂(E) ≤ N √(N + 1), for keys whose Φ has a unit diagonal.
"""

import numpy as np
from drawing import BLUE, GREEN, INK, ORANGE, clustered, panels
from recorded import table

import precondattn as pa
from claims.inputs import real

SMALL = {"lengths": (8, 16)}
COLOURS = {"equal": ORANGE, "clustered": GREEN, "of a trained model": BLUE, "random": INK}


def condition_number(k):
    """The largest κ₂(E) of heads, for keys (1, N, h, d)."""
    inverse = pa.diagnostics.weights(pa.LucidSolve(), k, v=k)
    return pa.diagnostics.condition_number(inverse).max().item()


def run(lengths=(16, 32, 64, 128, 252, 512, 1024)):
    """κ₂ for each kind of keys of width 32 and each length."""
    rng, (model,) = np.random.default_rng(0), real("k")
    found = {"tokens": list(lengths)}
    for kind in COLOURS:
        found[kind] = []
        for tokens in lengths:
            if kind == "of a trained model":
                k = model[:, :tokens] if tokens <= model.shape[1] else None
            else:
                k = {
                    "equal": np.ones((1, tokens, 1, 32)),
                    "clustered": clustered(tokens, 32, 8, 0.1),
                    "random": rng.normal(size=(1, tokens, 1, 32)),
                }[kind]
            found[kind].append(None if k is None else condition_number(k))
    return found


def bound(tokens):
    return tokens * np.sqrt(tokens + 1.0)


def rows(found):
    """κ₂ by length."""
    values = zip(*(found[kind] for kind in COLOURS), strict=True)
    cells = [
        (n, *("" if x is None else x for x in of), float(bound(n)))
        for n, of in zip(found["tokens"], values, strict=True)
    ]
    return table(("tokens", *COLOURS, "bound"), cells)


def draw(found):
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
