"""LUCID's triangular solve in blocks of tokens that devices solve one after another.

Φ y_J is softmax attention without normalisation: for rows that attend to the keys of block J with
output o and log-sum-exp λ,

    Φ y_J = e^{λ − s d} o,

which is bounded like Φ, and which every backend can compute.
"""

from __future__ import annotations

import math

from precondattn.algebra.mechanism import Leaf
from precondattn.arrays import Array, Arrays, namespace, upcast, zero_where_not
from precondattn.given import Given
from precondattn.parallel.layouts import TokenOrder
from precondattn.parallel.partial_attention import part_vjp, with_lse
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


def product(
    leaf: LucidSolve, rows: Array, keys: Array, y: Array, seen_by: Array | None, **options: Given
) -> Array:
    """Φ y of rows and keys of scores; 0 for rows that `seen_by` (b, t) excludes."""
    softmax, shift = _attention_of(leaf, keys.shape[-1])
    out, lse = with_lse(softmax, rows, keys, y, **options)
    of_rows = namespace(lse).exp(lse - shift)[..., None] * out
    return of_rows if seen_by is None else zero_where_not(seen_by[..., None, None], of_rows)


def product_vjp(
    leaf: LucidSolve,
    rows: Array,
    keys: Array,
    y: Array,
    d_product: Array,
    seen_by: Array | None,
    **options: Given,
) -> Arrays:
    """The gradients of a product with respect to its rows "q", its keys "k", and y "v"."""
    softmax, shift = _attention_of(leaf, keys.shape[-1])
    xp, inputs = namespace(d_product), {"q": rows, "k": keys, "v": y}
    lse = xp.full_like(d_product[..., 0], shift)
    if seen_by is not None:
        lse = xp.where(seen_by[..., None], lse, math.inf)
    return part_vjp(softmax, inputs, xp.zeros_like(d_product), lse, d_product, **options)


def _attention_of(leaf: LucidSolve, d: int) -> tuple[Softmax, float]:
    """The softmax attention whose exponentiated scores are Φ, and the shift s d."""
    scale = leaf.scale_for(d)
    shift = scale * d if leaf.has_unit_diagonal else 0.0
    return Softmax(causal=False, scale=scale), shift
