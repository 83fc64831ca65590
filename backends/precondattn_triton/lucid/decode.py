"""LUCID one token at a time: every cached key and y is read once, by many programs at once.

    [S; Φ] = [s q; s k̂] Kᵀ,    [a; r] = [e^{S − m}; Φ] Y               (`read_past`, by splits)
    y = β (v − r),    o = (a + e^{S_new − m} y) / (Σ e^{S − m} + e^{S_new − m})     (`finish`)

The query heads of a key/value head and the new key are the rows of one tile. A query's row has a
running maximum; the key's has none, since Φ ≤ 1. Products are of float32 (tf32 for half precision,
which holds all of bfloat16 and float16), because a step waits for memory, and not for products.
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
    """One split of one key/value head: a and r, m and Σ e^{S − m}, for every row of the tile."""
    split, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, n = head // heads, head % heads
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH).to(tl.int64)
    key_channel = tl.arange(0, KEY_WIDTH).to(tl.int64)
    own = k + b * k_b + n * k_n + key_channel * k_d
    own = tl.load(own, mask=key_channel < key_width, other=0.0).to(tl.float32)
    unit, _ = unit_key(own, key_width, eps, NORMALIZE)
    is_key = row == group
    rows = query_rows(q, head, heads, group, key_width, q_b, q_h, q_d, ROWS, KEY_WIDTH)
    rows = tl.where(is_key[:, None], unit[None, :] * key_scale, rows * scale)

    largest = tl.where(is_key, 0.0, float("-inf"))
    total_weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    start = split * per_split
    for low in range(start, tl.minimum(start + per_split, count), TOKENS):
        token = (low + tl.arange(0, TOKENS)).to(tl.int64)
        seen = token < count
        if HAS_VALID:
            seen = seen & (tl.load(past_valid + b * valid_b + token, mask=seen, other=0) != 0)
        at = past_keys + b * key_b + n * key_n + token[:, None] * key_c
        inside = seen[:, None] & (key_channel < key_width)[None, :]
        keys = tl.load(at + key_channel[None, :] * key_d, mask=inside, other=0.0).to(tl.float32)
        scores = tl.dot(rows, tl.trans(keys), input_precision=PRECISION)
        logs = scores
        if NORMALIZE:
            rms = tl.load(past_rms + b * rms_b + n * rms_n + token * rms_c, mask=seen, other=1.0)
            logs = scores / tl.where(rms > 0, rms, 1.0)[None, :]
        logs = tl.where(is_key[:, None], logs - shift, scores)
        logs = tl.where(seen[None, :], logs, float("-inf"))
        higher = tl.where(is_key, 0.0, tl.maximum(largest, tl.max(logs, axis=1)))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logs - base[:, None])
        kept = tl.exp2(largest - base)
        at = past_solved + b * y_b + n * y_n + token[:, None] * y_c
        inside = seen[:, None] & (channel < width)[None, :]
        y = tl.load(at + channel[None, :] * y_e, mask=inside, other=0.0).to(tl.float32)
        total = total * kept[:, None] + tl.dot(weights, y, input_precision=PRECISION)
        total_weight = total_weight * kept + tl.sum(weights, axis=1)
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
    own_rms,
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
    """`out` (b, h, e), `solved` (b, n, e) and `own_rms` (b, n), from the splits of a head."""
    head = tl.program_id(0).to(tl.int64)
    b, n = head // heads, head % heads
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH).to(tl.int64)
    key_channel = tl.arange(0, KEY_WIDTH).to(tl.int64)
    is_key = row == group
    counts = n >= 0
    if HAS_VALID:
        counts = tl.load(new_valid + b * valid_b) != 0

    largest = tl.where(is_key, 0.0, float("-inf"))
    total_weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for split in range(0, splits):
        part = (head * splits + split) * ROWS + row
        here = tl.load(maxima + part)
        higher = tl.maximum(largest, here)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept, added = tl.exp2(largest - base), tl.exp2(here - base)
        found = tl.load(totals + part[:, None] * WIDTH + channel[None, :])
        total = total * kept[:, None] + found * added[:, None]
        total_weight = total_weight * kept + tl.load(sums + part) * added
        largest = higher

    own = k + b * k_b + n * k_n + key_channel * k_d
    own = tl.load(own, mask=(key_channel < key_width) & counts, other=0.0).to(tl.float32)
    _, rms = unit_key(own, key_width, eps, NORMALIZE)
    inside = (channel < width) & counts
    value = tl.load(v + b * v_b + n * v_n + channel * v_e, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if HAS_BETA:
        factor = tl.load(beta + b * beta_b + n * beta_n).to(tl.float32)
    read = tl.sum(tl.where(is_key[:, None], total, 0.0), axis=0)
    y = tl.where(inside, factor * (value - read), 0.0)
    tl.store(solved + head * width + channel, y.to(solved.dtype.element_ty), mask=channel < width)
    if NORMALIZE:
        tl.store(own_rms + head, rms)

    rows = query_rows(q, head, heads, group, key_width, q_b, q_h, q_d, ROWS, KEY_WIDTH) * scale
    own_score = tl.where(counts, tl.sum(rows * own[None, :], axis=1), float("-inf"))
    higher = tl.maximum(largest, own_score)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    kept, added = tl.exp2(largest - base), tl.exp2(own_score - base)
    weight = total_weight * kept + added
    is_row = weight > 0
    if is_token is not None:
        is_row = is_row & (tl.load(is_token + b * token_b) != 0)
    o = total * kept[:, None] + y[None, :] * added[:, None]
    o = tl.where(is_row[:, None], o / tl.where(is_row, weight, 1.0)[:, None], 0.0)
    at = out + (b * heads * group + n * group + row[:, None]) * width + channel[None, :]
    stored = (row < group)[:, None] & (channel < width)[None, :]
    tl.store(at, o.to(out.dtype.element_ty), mask=stored)
