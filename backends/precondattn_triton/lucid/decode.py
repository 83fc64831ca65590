"""A step of LUCID by a few tokens: many programs share the cache; each key and y is read once.

    [S; Φ] = [s q; s k̂] Kᵀ,    [a; r] = [e^{S − m}; Φ] Y                          (`read_past`)

and then for each new token i in turn, for the rows of queries from i on and of keys after i,

    y_i = β_i (v_i − r_i),    a ← a e^{m − m'} + e^{S_i − m'} y_i,    r ← r + Φ_i y_i   (`finish`)

where m' is the new maximum, and Σ e^{S − m} is updated like a; at the end o = a / Σ e^{S − m}.

The query heads of a key/value head, each with its t new tokens, and the t new keys are the rows of
one tile. The row of a query has a running maximum; that of a key has none, since Φ ≤ 1. Products
are in float32 (tf32 for half precision, which represents bfloat16 and float16 exactly), because
memory limits a step, not products. Grids: one program per split of the cache and key/value head
(`read_past`), per key/value head (`finish`).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from precondattn_triton.softmax.step_rows import channels_of, finite, slots_of
from precondattn_triton.tiles import start_of


class LucidStepSizes(NamedTuple):
    """The sizes and factors of a step, as an argument of a kernel."""

    heads: int
    group: int
    """The query heads of a key/value head"""
    t: int
    key_width: int
    width: int
    eps: float
    scale: float
    """The factor of queries; `key_scale` is that of keys. Both are in units of log 2."""
    key_scale: float
    shift: float


@triton.jit
def unit_key(k, width, eps, NORMALIZE: tl.constexpr):
    """k̂ and rms(k) of one key (d)."""
    rms = 1.0
    if NORMALIZE:
        mean_square = tl.sum(k * k, axis=0) / width + eps
        rms = tl.sqrt(tl.where(mean_square > 0, mean_square, 1.0))
    return k / rms, rms


@triton.jit
def step_rows(
    q, k, head, sizes, NORMALIZE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """s q of t tokens of each query head, then s k̂ of t tokens (ROWS, d); other rows are 0."""
    b, n, group = head // sizes.heads, head % sizes.heads, sizes.group
    row, channel = tl.arange(0, ROWS), tl.arange(0, WIDTH).to(tl.int64)
    token, member = (row % sizes.t)[:, None].to(tl.int64), (row // sizes.t)[:, None]
    is_channel = (channel < sizes.key_width)[None, :]
    at = start_of(q, b, n * group + member) + token * q.token + channel[None, :] * q.channel
    queries = tl.load(at, mask=(member < group) & is_channel, other=0.0).to(tl.float32)
    at = start_of(k, b, n) + token * k.token + channel[None, :] * k.channel
    keys = tl.load(at, mask=(member == group) & is_channel, other=0.0).to(tl.float32)
    if NORMALIZE:
        mean_square = tl.sum(keys * keys, axis=1) / sizes.key_width + sizes.eps
        keys = keys / tl.sqrt(tl.where(mean_square > 0, mean_square, 1.0))[:, None]
    return tl.where(member == group, keys * sizes.key_scale, queries * sizes.scale)


@triton.jit(do_not_specialize=["count"])
def read_past(
    q, k, past_keys, past_solved, past_rms, past_valid, totals, maxima, sums,
    count, sizes, valid_b, per_split,
    NORMALIZE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """a and r, m and Σ e^{S − m} of every row, over one split of the cached tokens of a head."""
    split, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, n = head // sizes.heads, head % sizes.heads
    row, channel = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_key = row // sizes.t == sizes.group
    rows = step_rows(q, k, head, sizes, NORMALIZE, ROWS, KEY_WIDTH)

    largest = tl.where(is_key, 0.0, float("-inf"))
    total_weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    start = split * per_split
    key_start, y_start = start_of(past_keys, b, n), start_of(past_solved, b, n)
    for low in range(start, tl.minimum(start + per_split, count), TOKENS):
        token = (low + tl.arange(0, TOKENS)).to(tl.int64)
        is_read = token < count
        if past_valid is not None:
            is_read = is_read & (
                tl.load(past_valid + b * valid_b + token, mask=is_read, other=0) != 0
            )
        keys = slots_of(past_keys, key_start, token, is_read, sizes.key_width, KEY_WIDTH)
        scores = tl.dot(rows, tl.trans(keys), input_precision=PRECISION)
        logs = scores
        if NORMALIZE:
            at = start_of(past_rms, b, n) + token * past_rms.token
            rms = tl.load(at, mask=is_read, other=1.0)
            logs = scores / tl.where(rms > 0, rms, 1.0)[None, :]
        logs = tl.where(is_key[:, None], logs - sizes.shift, scores)
        logs = tl.where(is_read[None, :], logs, float("-inf"))
        higher = tl.where(is_key, 0.0, tl.maximum(largest, tl.max(logs, axis=1)))
        base = finite(higher)
        weights = tl.exp2(logs - base[:, None])
        shrink = tl.exp2(largest - base)
        y = slots_of(past_solved, y_start, token, is_read, sizes.width, WIDTH)
        total = total * shrink[:, None] + tl.dot(weights, y, input_precision=PRECISION)
        total_weight = total_weight * shrink + tl.sum(weights, axis=1)
        largest = higher
    part = (head * tl.num_programs(0) + split) * ROWS + row
    tl.store(maxima + part, largest)
    tl.store(sums + part, total_weight)
    tl.store(totals + part[:, None] * WIDTH + channel[None, :], total)


@triton.jit(do_not_specialize=["splits"])
def finish(
    q, k, v, beta, new_valid, is_token, totals, maxima, sums, out, solved, new_rms,
    splits, sizes, valid_b, token_b,
    NORMALIZE: tl.constexpr, ROWS: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write `out` (b, t, h, e), `solved` (b, t, n, e) and `new_rms` (b, t, n)."""
    head = tl.program_id(0).to(tl.int64)
    heads, group, t, width = sizes.heads, sizes.group, sizes.t, sizes.width
    b, n = head // heads, head % heads
    row, channel = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    token, member = row % t, row // t
    is_key = member == group

    largest = tl.where(is_key, 0.0, float("-inf"))
    total_weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for split in range(0, splits):
        part = (head * splits + split) * ROWS + row
        split_largest = tl.load(maxima + part)
        higher = tl.maximum(largest, split_largest)
        base = finite(higher)
        shrink, split_weight = tl.exp2(largest - base), tl.exp2(split_largest - base)
        split_total = tl.load(totals + part[:, None] * WIDTH + channel[None, :])
        total = total * shrink[:, None] + split_total * split_weight[:, None]
        total_weight = total_weight * shrink + tl.load(sums + part) * split_weight
        largest = higher

    rows = step_rows(q, k, head, sizes, NORMALIZE, ROWS, KEY_WIDTH)
    for i in range(0, t):
        is_valid = n >= 0
        if new_valid is not None:
            is_valid = tl.load(new_valid + b * valid_b + i) != 0
        new_key = channels_of(k, b, i, n, sizes.key_width, is_valid, KEY_WIDTH)
        unit, rms = unit_key(new_key, sizes.key_width, sizes.eps, NORMALIZE)
        value = channels_of(v, b, i, n, width, is_valid, WIDTH)
        factor = 1.0
        if beta is not None:
            factor = tl.load(start_of(beta, b, n) + i * beta.token).to(tl.float32)
        prior = tl.sum(tl.where((row == group * t + i)[:, None], total, 0.0), axis=0)
        y = tl.where((channel < width) & is_valid, factor * (value - prior), 0.0)
        at_new = (b * t + i) * heads + n
        at_y = solved + at_new * width + channel
        tl.store(at_y, y.to(solved.dtype.element_ty), mask=channel < width)
        if NORMALIZE:
            tl.store(new_rms + at_new, rms)

        column = tl.where(is_key[:, None], unit[None, :], new_key[None, :])
        logs = tl.sum(rows * column, axis=1) - tl.where(is_key, sizes.shift, 0.0)
        sees = tl.where(is_key, token > i, token >= i) & is_valid
        logs = tl.where(sees, logs, float("-inf"))
        higher = tl.where(is_key, 0.0, tl.maximum(largest, logs))
        base = finite(higher)
        shrink, weight = tl.exp2(largest - base), tl.exp2(logs - base)
        total = total * shrink[:, None] + y[None, :] * weight[:, None]
        total_weight = total_weight * shrink + weight
        largest = higher

    is_row = total_weight != 0  # A NaN in a key makes the weight NaN, which is not 0.
    if is_token is not None:
        is_row = is_row & (tl.load(is_token + b * token_b + token) != 0)
    o = tl.where(is_row[:, None], total / tl.where(is_row, total_weight, 1.0)[:, None], 0.0)
    at = ((b * t + token) * heads * group + n * group + member) * width
    at = out + at[:, None] + channel[None, :]
    stored = (member < group)[:, None] & (channel < width)[None, :]
    tl.store(at, o.to(out.dtype.element_ty), mask=stored)
