"""LUCID's triangular solve in blocks of tokens that devices solve one after another.

Φ y_J is softmax attention without normalisation (`torch/solve.py`): for rows that attend to the
keys of block J with output o and log-sum-exp λ, Φ y_J = e^{λ − s d} o.
"""

from __future__ import annotations

from precondattn.algebra.mechanism import Leaf
from precondattn.arrays import Array, upcast
from precondattn.parallel.layouts import TokenOrder
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.metric import DOT
from precondattn.spec.rms_norm import rms_norm
from precondattn.spec.softmax import Softmax

BLOCK = 512
"""The most tokens of a block, which are solved before they are broadcast."""


def refusal(leaf: Leaf, order: TokenOrder) -> str | None:
    """The reason why the solve of a leaf can not be divided; None if it can."""
    assert isinstance(leaf, LucidSolve)  # `way_of` has checked it.
    if leaf.metric is not DOT:
        return f"divides solves of dot products; found the metric {leaf.metric.name}"
    if leaf.window is not None or leaf.normalize == "rows":
        return "divides solves without a window or normalize=rows"
    return None


def keys_of_scores(leaf: LucidSolve, k: Array) -> Array:
    """The keys whose products are the scores of Φ, in float32 or wider."""
    return rms_norm(upcast(k), leaf.eps) if leaf.normalize == "keys" else upcast(k)


def attention_of(leaf: LucidSolve, d: int) -> tuple[Softmax, float]:
    """The softmax attention whose exponentiated scores are Φ, and the shift s d."""
    scale = leaf.scale_for(d)
    shift = scale * d if leaf.has_unit_diagonal else 0.0
    return Softmax(causal=False, scale=scale), shift
