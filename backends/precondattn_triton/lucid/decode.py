"""A step of LUCID by one token: many programs share the cache; each key and y is read once.

    [S; Φ] = [s q; s k̂] Kᵀ,    [a; r] = [e^{S − m}; Φ] Y                          (`read_past`)
    y = β (v − r),    o = (a + e^{S_new − m} y) / (Σ e^{S − m} + e^{S_new − m})     (`finish`)

The query heads of a key/value head and the new key are the rows of one tile. The row of a query has
a running maximum; that of the key has none, since Φ ≤ 1. Products are in float32 (tf32 for half
precision, which represents bfloat16 and float16 exactly), because memory limits a step, not
products. Grids: one program per split of the cache and key/value head (`read_past`), per key/value
head (`finish`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.decoding import query_rows


@triton.jit
def unit_key(k, width, eps, NORMALIZE: tl.constexpr):
    """k̂ and rms(k) of one key (d)."""
    rms = 1.0
    if NORMALIZE:
        mean_square = tl.sum(k * k, axis=0) / width + eps
        rms = tl.sqrt(tl.where(mean_square > 0, mean_square, 1.0))
    return k / rms, rms


@triton.jit(do_not_specialize=["count"])
def read_past(
    q,
    k,
    past_keys,
    past_solved,
    past_rms,
    past_valid,
    totals,
    maxima,
    sums,
    count,
    heads,
    group,
    key_width,
    width,
    eps,
    scale,
    key_scale,
    shift,
    q_b,
    q_h,
    q_d,
    k_b,
    k_n,
    k_d,
    key_b,
    key_c,
    key_n,
    key_d,
    y_b,
    y_c,
    y_n,
    y_e,
    rms_b,
    rms_c,
    rms_n,
    valid_b,
    per_split,
    NORMALIZE: tl.constexpr,
    HAS_VALID: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """a and r, m and Σ e^{S − m} of every row, over one split of the cached tokens of a head."""
    split, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, n = head // heads, head % heads
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH).to(tl.int64)
    key_channel = tl.arange(0, KEY_WIDTH).to(tl.int64)
    new_key = k + b * k_b + n * k_n + key_channel * k_d
    new_key = tl.load(new_key, mask=key_channel < key_width, other=0.0).to(tl.float32)
    unit, _ = unit_key(new_key, key_width, eps, NORMALIZE)
    is_key = row == group
    rows = query_rows(q, head, heads, group, key_width, q_b, q_h, q_d, ROWS, KEY_WIDTH)
    rows = tl.where(is_key[:, None], unit[None, :] * key_scale, rows * scale)

    largest = tl.where(is_key, 0.0, float("-inf"))
    total_weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    start = split * per_split
    for low in range(start, tl.minimum(start + per_split, count), TOKENS):
        token = (low + tl.arange(0, TOKENS)).to(tl.int64)
        is_read = token < count
        if HAS_VALID:
            is_read = is_read & (
                tl.load(past_valid + b * valid_b + token, mask=is_read, other=0) != 0
            )
        at = past_keys + b * key_b + n * key_n + token[:, None] * key_c
        inside = is_read[:, None] & (key_channel < key_width)[None, :]
        keys = tl.load(at + key_channel[None, :] * key_d, mask=inside, other=0.0).to(tl.float32)
        scores = tl.dot(rows, tl.trans(keys), input_precision=PRECISION)
        logs = scores
        if NORMALIZE:
            rms = tl.load(past_rms + b * rms_b + n * rms_n + token * rms_c, mask=is_read, other=1.0)
            logs = scores / tl.where(rms > 0, rms, 1.0)[None, :]
        logs = tl.where(is_key[:, None], logs - shift, scores)
        logs = tl.where(is_read[None, :], logs, float("-inf"))
        higher = tl.where(is_key, 0.0, tl.maximum(largest, tl.max(logs, axis=1)))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logs - base[:, None])
        shrink = tl.exp2(largest - base)
        at = past_solved + b * y_b + n * y_n + token[:, None] * y_c
        inside = is_read[:, None] & (channel < width)[None, :]
        y = tl.load(at + channel[None, :] * y_e, mask=inside, other=0.0).to(tl.float32)
        total = total * shrink[:, None] + tl.dot(weights, y, input_precision=PRECISION)
        total_weight = total_weight * shrink + tl.sum(weights, axis=1)
        largest = higher
    part = (head * tl.num_programs(0) + split) * ROWS + row
    tl.store(maxima + part, largest)
    tl.store(sums + part, total_weight)
    tl.store(totals + part[:, None] * WIDTH + channel[None, :], total)


@triton.jit(do_not_specialize=["splits"])
def finish(
    q,
    k,
    v,
    beta,
    new_valid,
    is_token,
    totals,
    maxima,
    sums,
    out,
    solved,
    new_rms,
    splits,
    heads,
    group,
    key_width,
    width,
    eps,
    scale,
    q_b,
    q_h,
    q_d,
    k_b,
    k_n,
    k_d,
    v_b,
    v_n,
    v_e,
    beta_b,
    beta_n,
    valid_b,
    token_b,
    NORMALIZE: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_VALID: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write `out` (b, h, e), `solved` (b, n, e) and `new_rms` (b, n) from the splits of a head."""
    head = tl.program_id(0).to(tl.int64)
    b, n = head // heads, head % heads
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH).to(tl.int64)
    key_channel = tl.arange(0, KEY_WIDTH).to(tl.int64)
    is_key = row == group
    is_valid = n >= 0
    if HAS_VALID:
        is_valid = tl.load(new_valid + b * valid_b) != 0

    largest = tl.where(is_key, 0.0, float("-inf"))
    total_weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for split in range(0, splits):
        part = (head * splits + split) * ROWS + row
        split_largest = tl.load(maxima + part)
        higher = tl.maximum(largest, split_largest)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, split_weight = tl.exp2(largest - base), tl.exp2(split_largest - base)
        split_total = tl.load(totals + part[:, None] * WIDTH + channel[None, :])
        total = total * shrink[:, None] + split_total * split_weight[:, None]
        total_weight = total_weight * shrink + tl.load(sums + part) * split_weight
        largest = higher

    new_key = k + b * k_b + n * k_n + key_channel * k_d
    new_key = tl.load(new_key, mask=(key_channel < key_width) & is_valid, other=0.0).to(tl.float32)
    _, rms = unit_key(new_key, key_width, eps, NORMALIZE)
    inside = (channel < width) & is_valid
    value = tl.load(v + b * v_b + n * v_n + channel * v_e, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if HAS_BETA:
        factor = tl.load(beta + b * beta_b + n * beta_n).to(tl.float32)
    read = tl.sum(tl.where(is_key[:, None], total, 0.0), axis=0)
    y = tl.where(inside, factor * (value - read), 0.0)
    tl.store(solved + head * width + channel, y.to(solved.dtype.element_ty), mask=channel < width)
    if NORMALIZE:
        tl.store(new_rms + head, rms)

    rows = query_rows(q, head, heads, group, key_width, q_b, q_h, q_d, ROWS, KEY_WIDTH) * scale
    new_score = tl.where(is_valid, tl.sum(rows * new_key[None, :], axis=1), float("-inf"))
    higher = tl.maximum(largest, new_score)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink, split_weight = tl.exp2(largest - base), tl.exp2(new_score - base)
    weight = total_weight * shrink + split_weight
    is_row = weight != 0  # Also true for NaN, which a NaN in a key gives.
    if is_token is not None:
        is_row = is_row & (tl.load(is_token + b * token_b) != 0)
    o = total * shrink[:, None] + y[None, :] * split_weight[:, None]
    o = tl.where(is_row[:, None], o / tl.where(is_row, weight, 1.0)[:, None], 0.0)
    at = out + (b * heads * group + n * group + row[:, None]) * width + channel[None, :]
    stored = (row < group)[:, None] & (channel < width)[None, :]
    tl.store(at, o.to(out.dtype.element_ty), mask=stored)
