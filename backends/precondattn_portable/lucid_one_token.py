"""One token of LUCID after equally long caches, of which no token is masked.

    [S; Φ] = [s q; s k̂] Kᵀ,    [a; r] = [e^{S − m}; Φ] Y,    y = β (v − r),
    o = (a + e^{s q·k − m} y) / (Σ e^{S − m} + e^{s q·k − m})

Cached keys and y are read where they are, each once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import precondattn as pa
from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import row_sum
from precondattn.spec.rms_norm import rms
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.extension import past_columns, past_heads
from precondattn_portable.in_place import divide_at, subtract_at
from precondattn_portable.layout import tokens_at
from precondattn_portable.lucid_solve import FACTORED
from precondattn_portable.one_query import queries_by_key_head


class LucidToken(NamedTuple):
    """The output, y, and the norm of the key where the cache stores norms."""

    out: Array
    """(b, 1, h, e)"""
    y: Array
    """(b, 1, n, e)"""
    rms: Array | None
    """(b, 1, n)"""


def lucid_of_one_token(
    ops: Arithmetic,
    solve: pa.LucidSolve,
    softmax: pa.Softmax,
    past: Mapping[str, Array],
    x: Mapping[str, Array],
    held: int,
) -> LucidToken:
    """The token after `held` others, by the leaves `lucid_solve` and `softmax`."""
    xp, (b, _, n, d), h = namespace(x["k"]), x["k"].shape, x["q"].shape[2]
    reading, solving = tokens_at(0, h // n), tokens_at(h // n, h // n + 1)
    k, v = xp.reshape(x["k"], (b, n, 1, d)), xp.reshape(x["v"], (b, n, 1, -1))
    keys, solved = past_columns(past["key"], held), past_heads(past["solved"], held)
    q, scale = queries_by_key_head(x["q"], n) * softmax.scale_for(d), solve.scale_for(d)
    r = rms(k, solve.eps) if solve.normalize == "keys" else None
    unit = k * scale if r is None else k * (scale / r)

    weights = ops.product(xp.concat([q, unit], axis=2), keys)
    own = row_sum(q * k)
    largest = xp.maximum(own, xp.max(weights[reading], axis=-1, keepdims=True)) if held else own
    subtract_at(ops, weights, reading, largest)
    if r is not None:
        divide_at(ops, weights, solving, past_heads(past["rms"], held)[:, :, None, :])
    # As a factor of the products, where its reciprocal is not large.
    shift, factor = scale * d, 1.0
    if shift <= FACTORED:
        factor = math.exp(-shift)
    else:
        subtract_at(ops, weights, solving, shift)
    weights = ops.exp(weights)

    read = ops.product(weights, solved)
    y = v - read[solving] * factor
    if solve.beta:
        y = xp.reshape(x["lucid_beta"], (b, n, 1, 1)) * y
    own = ops.exp(own - largest)
    total = row_sum(weights[reading]) + own
    out = ops.divide(ops.add_multiple(read[reading], own, y), total)
    return LucidToken(
        xp.reshape(out, (b, 1, h, -1)),
        xp.reshape(y, (b, 1, n, -1)),
        None if r is None else xp.reshape(r, (b, 1, n)),
    )
