"""Inputs at which a formula that is right on paper overflows, underflows, or loses all its digits.

=============  ==================================================================================
huge_logits    queries and keys so long that e^⟨q, k⟩ overflows: softmax has to subtract a maximum
tied_logits    the same with three distinct keys: weights are equal, and as good as 0 elsewhere
tiny_logits    queries and keys as good as 0: attention is a mean; a norm divides by almost nothing
extreme_gates  decays of 1, of almost 1, of e⁻²⁰ and of 0, next to each other; β at its ends
far_values     values 100 apart: e^{v − max v} is 0 for most of them
hidden_by_bias  biases of −∞, in one row everywhere: that row sees nothing
overwritten    a large value is written to a state, and taken back, before anything is read
=============  ==================================================================================

Each leaves the answer well defined: a correct computation is as accurate as on harmless inputs.
"""

from __future__ import annotations

import numpy as np

import precondattn as pa
from precondattn_conformance.inputs import Arrays, Layout, make_inputs

SATURATED = ("huge_logits", "tied_logits")
EXTREMES = (
    *SATURATED,
    *("tiny_logits", "extreme_gates", "far_values", "hidden_by_bias", "overwritten"),
)

HUGE = {"float64": 2000.0}
"""The size of the logits: e^710 overflows in float64, e^89 in float32."""
HUGE_ELSEWHERE = 60.0
TINY = {"float64": 1e-8, "float32": 1e-6}
TINY_ELSEWHERE = 2.0**-5
GATES = np.asarray([0.0, -1e-4, -20.0, -0.5, -1e4, 0.0, -3.0])
"""Logarithms of decays."""
FAR = 50.0
LARGE = 256.0
KEEP_A_SUM = ("linear", "delta", "gated_delta", "gla")
"""Mechanisms whose state is a sum, from which what was written can be taken away."""


def makes_sense(mechanism: pa.Mechanism, kind: str) -> bool:
    """Whether this extreme is one for the mechanism, and its answer is still well conditioned."""
    inputs = mechanism.inputs
    leaves = mechanism.program.leaves
    if kind == "extreme_gates":
        return any(_is_gate(mechanism, name) for name in inputs)
    if kind == "hidden_by_bias":
        return "bias" in inputs and inputs["bias"].is_pairwise
    if kind == "overwritten":
        return str(mechanism) in KEEP_A_SUM
    if kind == "far_values":
        return any(getattr(leaf, "read", None) == pa.spec.laser.LOG_MEAN_EXP for leaf in leaves)
    attends = any(isinstance(leaf, pa.Softmax) for leaf in leaves) and {"q", "k"} <= inputs.keys()
    if kind == "tiny_logits":
        return attends and not any(_is_not_tiny(leaf) for leaf in leaves)
    return attends


def at_an_extreme(mechanism: pa.Mechanism, layout: Layout, kind: str, dtype: str) -> Arrays:
    """The inputs of a mechanism at one of the extremes."""
    made = make_inputs(mechanism, layout, "duplicate" if kind == "tied_logits" else "random")
    if kind in ("huge_logits", "tied_logits", "tiny_logits"):
        factor = HUGE.get(dtype, HUGE_ELSEWHERE) ** 0.5
        if kind == "tiny_logits":
            factor = TINY.get(dtype, TINY_ELSEWHERE)
        for name in ("q", "k", "q2", "k2"):
            if name in made and not mechanism.inputs[name].unit:
                made[name] = factor * made[name]
    if kind == "extreme_gates":
        for name, array in made.items():
            if _is_gate(mechanism, name):
                made[name] = np.resize(GATES, array.size).reshape(array.shape)
            elif name in ("beta", "lucid_beta"):
                ends = (mechanism.inputs[name].low, mechanism.inputs[name].high)
                made[name].flat[::3], made[name].flat[1::3] = ends
    if kind == "hidden_by_bias":
        hidden = np.random.default_rng(6).random(made["bias"].shape) < 0.3
        hidden[..., -1, :] = True
        made["bias"] = np.where(hidden, -np.inf, made["bias"])
    if kind == "overwritten":
        _write_twice(made)
    if kind == "far_values" and "v" in made:
        made["v"] = made["v"] + FAR * np.sign(np.random.default_rng(5).normal(size=made["v"].shape))
    return made


def _write_twice(made: Arrays) -> None:
    """256 times a value under a key, and then what takes it away; queries are 0 until then.

    A state that is kept in half precision has by then forgotten what else was written. Keys are
    rows of a Hadamard matrix, whose products are exact.
    """
    b, tokens, n, d = made["k"].shape
    rows = np.asarray([[1.0]])
    while len(rows) < d:
        rows = np.block([[rows, rows], [rows, -rows]])
    again = tokens // 2
    keys = (rows / d**0.5)[np.arange(tokens) % d]
    made["k"] = np.broadcast_to(keys[None, :, None], (b, tokens, n, d)).copy()
    made["k"][:, again] = made["k"][:, 0]
    made["v"][:, 0] *= LARGE
    made["q"][:, : again + 1] = 0
    if "g" in made:
        made["g"] = np.zeros_like(made["g"])
    if "beta" in made:
        made["beta"][:, [0, again]] = 1.0
    else:
        made["v"][:, again] = -made["v"][:, 0]


def _is_not_tiny(leaf: pa.Mechanism) -> bool:
    """Whether it makes features of what is as good as 0, or a constant of what is all alike."""
    is_by_channel = getattr(leaf, "axis", "") == "channel"
    return is_by_channel or isinstance(leaf, pa.EluPlusOne | pa.HedgehogMap)


def _is_gate(mechanism: pa.Mechanism, name: str) -> bool:
    """Whether an input is the logarithm of a decay."""
    pattern = mechanism.inputs[name]
    return name == "g" and pattern.high == 0
