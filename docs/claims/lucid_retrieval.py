"""LUCID retrieves precisely: where a query equals a key, its weights are one-hot.

The weights of LUCID are A P, softmax's times the preconditioner's. With q_t = k_t and keys of RMS
norm 1 they are diag(1 / Σ_j Φ_tj): one-hot, but attenuated by the sum of the key's own row.
"""

import numpy as np
from drawing import clustered, maps, weights
from recorded import table

import precondattn as pa
from claims.inputs import real

SMALL = {"tokens": 16}
MECHANISMS = ("softmax", "lucid", "qk_norm(lucid)")


def run(tokens=96):
    """The absolute weights of the last queries on their keys and on others, by kind of keys."""
    keys = {
        "random": np.random.default_rng(0).normal(size=(1, tokens, 1, 32)),
        "clustered": clustered(tokens, 32, 8, 0.1),
        "of a trained model": real("k")[0][:, -tokens:, :1],
    }
    found = {}
    for kind, k in keys.items():
        for name in MECHANISMS:
            on = np.abs(weights(pa.parse(name), k, k))
            own = np.diag(on)
            others = on.sum(1) - own
            of = {"own": own, "others": others, "share": others / (own + others)}
            means = {what: float(x[tokens // 2 :].mean()) for what, x in of.items()}
            found[f"{kind}, {name}"] = means
    return found


def rows(found):
    """Own weight and the others' share."""
    head = ("keys", "mechanism", "weight on its own key", "on all others", "share of the others")
    cells = []
    for (kind, name), x in ((key.split(", "), x) for key, x in found.items()):
        cells.append((kind, f"`{name}`", x["own"], x["others"], f"{100 * x['share']:.3g} %"))
    return table(head, cells)


def draw(found):
    """Maps of 24 clustered keys that are their own queries."""
    k = clustered(24, 32, 4, 0.1)
    return maps({name: weights(pa.parse(name), k, k) for name in MECHANISMS}, signed=True)
