"""Inputs at which a formula that is right on paper overflows, underflows, or loses all its digits.

=============  ==================================================================================
huge_logits    queries and keys so long that e^⟨q, k⟩ overflows: softmax has to subtract a maximum
tied_logits    the same with three distinct keys: weights are equal, and as good as 0 elsewhere
tiny_logits    queries and keys as good as 0: attention is a mean; a norm divides by almost nothing
extreme_gates  decays of 1, of almost 1, of e⁻²⁰ and of 0, next to each other; β at its ends
far_values     values 100 apart: e^{v − max v} is 0 for most of them
=============  ==================================================================================

Each leaves the answer well defined: a correct computation is as accurate as on harmless inputs.
"""

from __future__ import annotations

import numpy as np

import precondattn as pa
from precondattn_conformance.inputs import Arrays, Layout, make_inputs

SATURATED = ("huge_logits", "tied_logits")
EXTREMES = ("huge_logits", "tied_logits", "tiny_logits", "extreme_gates", "far_values")

HUGE = {"float64": 2000.0}
"""The size of the logits: e^710 overflows in float64, e^89 in float32."""
HUGE_ELSEWHERE = 60.0
TINY = {"float64": 1e-8, "float32": 1e-6}
TINY_ELSEWHERE = 2.0**-5
GATES = np.asarray([0.0, -1e-4, -20.0, -0.5, -1e4, 0.0, -3.0])
"""Logarithms of decays."""
FAR = 50.0


def makes_sense(mechanism: pa.Mechanism, kind: str) -> bool:
    """Whether this extreme is one for the mechanism, and its answer is still well conditioned."""
    inputs = mechanism.inputs
    leaves = mechanism.program.leaves
    if kind == "extreme_gates":
        return any(_is_gate(mechanism, name) for name in inputs)
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
    if kind == "far_values" and "v" in made:
        made["v"] = made["v"] + FAR * np.sign(np.random.default_rng(5).normal(size=made["v"].shape))
    return made


def _is_not_tiny(leaf: pa.Mechanism) -> bool:
    """Whether it makes features of what is as good as 0, or a constant of what is all alike."""
    is_by_channel = getattr(leaf, "axis", "") == "channel"
    return is_by_channel or isinstance(leaf, pa.EluPlusOne | pa.HedgehogMap)


def _is_gate(mechanism: pa.Mechanism, name: str) -> bool:
    """Whether an input is the logarithm of a decay."""
    pattern = mechanism.inputs[name]
    return name == "g" and pattern.high == 0
