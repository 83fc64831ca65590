"""LUCID retrieves precisely: where a query equals a key, its weights are one-hot.

The weights of LUCID are A P, softmax's times the preconditioner's. With q_t = k_t and keys of RMS
norm 1 they are diag(1 / Σ_j Φ_tj): one-hot, but attenuated by the sum of the key's own row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from make_figures import clustered, maps, weights
from matplotlib.figure import Figure

import precondattn as pa
from claims.claim import Claim, table
from precondattn_conformance.inputs import REAL, make_inputs

CLAIM = Claim(
    says="LUCID's weights are one-hot where a query equals a key",
    source="LUCID §3.2, Eq. 2",
    verdict="holds in part",
    because=(
        "It is exact for keys of RMS norm 1 (`qk_norm`). With raw keys, as in the paper, weight is "
        "left on other keys, since only the preconditioner's keys are normalised; on a trained "
        "model's keys as much as softmax leaves. In both cases the value arrives attenuated."
    ),
)
SMALL = {"tokens": 16}
"""Arguments of `run` for a test."""
ALT = (
    "Attention maps of 24 queries that equal the keys. Softmax's weights spread over similar "
    "keys, LUCID's are mostly on the diagonal, and with normed keys they are on the diagonal "
    "alone."
)
MECHANISMS = ("softmax", "lucid", "qk_norm(lucid)")


def run(tokens: int = 96) -> dict[str, Any]:
    """The absolute weights of the last query on its key and on others, for each kind of keys."""
    real = make_inputs(pa.Softmax(), REAL, "real")["k"][:, -tokens:, :1]
    rng = np.random.default_rng(0)
    keys = {
        "random": rng.normal(size=(1, tokens, 1, 32)),
        "clustered": clustered(tokens, 32, 8, 0.1),
        "of a trained model": real,
    }
    found: dict[str, Any] = {}
    for kind, k in keys.items():
        for name in MECHANISMS:
            on = np.abs(weights(pa.parse(name), k, k))
            own = np.diag(on)
            others = on.sum(1) - own
            found[f"{kind}, {name}"] = {
                "own": float(own[tokens // 2 :].mean()),
                "others": float(others[tokens // 2 :].mean()),
                "share": float((others / (own + others))[tokens // 2 :].mean()),
            }
    return found


def rows(found: dict[str, Any]) -> str:
    """Own weight and the others' share."""
    head = ("keys", "mechanism", "weight on its own key", "on all others", "share of the others")
    cells = [
        (*name.split(", "), x["own"], x["others"], f"{100 * x['share']:.3g} %")
        for name, x in found.items()
    ]
    return table(head, [(a, f"`{b}`", *rest) for a, b, *rest in cells])


def draw(found: dict[str, Any]) -> Figure:
    """Maps of 24 clustered keys that are their own queries."""
    k = clustered(24, 32, 4, 0.1)
    return maps({name: weights(pa.parse(name), k, k) for name in MECHANISMS}, signed=True)
