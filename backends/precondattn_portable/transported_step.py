"""A step of PaTH: cached keys are read once, and rewritten only at a flush.

The cache holds keys transported to the last multiple of `flush`, and the directions W of the
reflections since. With the new tokens' directions appended to W, B = tril(q Wᵀ) and
Z = (I + diag(β) stril(W Wᵀ))⁻¹ diag(β),

    (q − B Z W) Kᵀ                    scores with keys from before the last flush,
    q Kᵀ − B Z stril(W Kᵀ)            scores with keys since.

At a flush, with the reflections up to it, K ← K − (Z W Kᵀ)ᵀ W.
"""

from __future__ import annotations

import precondattn as pa
from precondattn.arrays import Array, Arrays, namespace
from precondattn.cache import Append, Replace, Rewrite, Updates
from precondattn.frame import Frame
from precondattn.spec.array_functions import transpose
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.extension import bias_of_filled, filled, past_heads, read_of_parts
from precondattn_portable.layout import (
    Tile,
    grouped_bias,
    grouped_queries,
    padded,
    time_first,
    ungrouped,
)
from precondattn_portable.masks import Mask
from precondattn_portable.scores import biased
from precondattn_portable.triangular_inverse import unit_lower_inverse


def transported_step(
    ops: Arithmetic, leaf: pa.Path, past: Arrays, x: Arrays, frame: Frame
) -> tuple[Array, Updates]:
    """A step of `Path` without a forget gate, for a few new tokens."""
    cached = filled(frame, past["key"].shape[1])
    start, flush = cached.offset, leaf.flush
    if start is None:  # Sequences differ in length, and so in the position of their last flush.
        result: tuple[Array, Updates] = leaf.step(past, x, frame)
        return result
    xp, (t, n, d) = namespace(x["k"]), x["k"].shape[1:]
    waiting = start % flush
    flushed = start - waiting
    keys = past_heads(past["key"], start)
    k, v, w = (ops.heads_first(x[name]) for name in ("k", "v", "w"))
    beta = ops.heads_first(x["beta"])[..., None]
    if waiting:
        w = xp.concat([past_heads(past["pending_w"], waiting), w], axis=2)
        beta = xp.concat([past_heads(past["pending_beta"], waiting)[..., None], beta], axis=2)
    recent = xp.concat([keys[:, :, flushed:, :], k], axis=2)
    inverse = unit_lower_inverse(ops, ops.lower(ops.product(beta * w, transpose(w)), -1))
    z = inverse * transpose(beta)

    q = grouped_queries(ops, x["q"], n) * leaf.scale_for(d)
    rows = xp.reshape(q, (*q.shape[:2], -1, d))
    q_w = xp.reshape(ops.product(rows, transpose(w)), (*q.shape[:4], waiting + t))
    q_w = xp.reshape(ops.lower(q_w, waiting), (*rows.shape[:3], waiting + t))
    q_w_z = ops.product(q_w, z)
    local = ops.product(rows, transpose(recent))
    w_k = ops.lower(ops.product(w, transpose(recent)), -1)
    local = ops.add_product(local, q_w_z, w_k, -1.0)
    far = ops.add_product(rows + 0, q_w_z, w, -1.0)
    row_block = xp.concat([ops.product(far, transpose(keys[:, :, :flushed, :])), local], axis=3)

    if leaf.bias:
        row_block = biased(
            ops, row_block, grouped_bias(bias_of_filled(x["bias"], frame, cached), n)
        )
    mask = Mask(cached.frame, start + t, start, window=leaf.window)
    row_block = mask.apply(ops, row_block, Tile(0, t, 0, start + t))
    o = read_of_parts(ops, leaf.read, row_block, [past_heads(past["value"], start), v])
    out = ungrouped(ops, xp.reshape(o, (*q.shape[:4], o.shape[3])))

    updates: Updates = {"value": Append(x["v"])}
    now = start + t - (start + t) % flush
    count = now - flushed
    if count:
        w_now, z_now = w[:, :, :count, :], z[:, :, :count, :count]
        reflected = ops.product(keys[:, :, :flushed, :], transpose(w_now))
        reflected = ops.product(reflected, transpose(z_now))
        old = ops.add_product(keys[:, :, :flushed, :] + 0, reflected, w_now, -1.0)
        reflected = transpose(ops.product(z_now, w_k[:, :, :count, :]))
        recent = ops.add_product(recent, reflected, w_now, -1.0)
        old = time_first(xp.concat([old, recent[:, :, :waiting, :]], axis=2))
        updates["key"] = Rewrite(old, time_first(recent[:, :, waiting:, :]))
    else:
        updates["key"] = Append(x["k"])
    if flush > 1:
        rest = flush - (start + t - now)
        updates["pending_w"] = Replace(time_first(padded(w[:, :, count:, :], 0, rest)))
        pending = padded(beta[:, :, count:, :], 0, rest)[..., 0]
        updates["pending_beta"] = Replace(time_first(pending))
    return out, updates
