"""What a solve starts from: normalised keys, β, and right-hand sides, in scratch.

    k̂ = k / rms(k),    rms(k) = √(mean(k²) + ε),  and 1 for a zero row where ε = 0

Padding of a sequence is not looked at: whatever stands there, NaN too, becomes 0.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalize_keys(
    k,
    beta,
    valid,
    unit,
    reciprocal,
    factor,
    s,
    heads,
    tokens,
    width,
    eps,
    k_b,
    k_s,
    k_n,
    k_d,
    beta_b,
    beta_s,
    beta_n,
    HAS_BETA: tl.constexpr,
    HAS_VALID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """`unit` (m, T, WIDTH) gets k̂, `reciprocal` (m, T) 1 / rms, `factor` (m, T) β or 0."""
    head = tl.program_id(1).to(tl.int64)
    b, n = head // heads, head % heads
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    channel = tl.arange(0, WIDTH).to(tl.int64)
    counts = token < s
    if HAS_VALID:
        counts = counts & (tl.load(valid + b * s + token, mask=counts, other=0) != 0)
    seen = counts[:, None] & (channel < width)[None, :]
    at = b * k_b + n * k_n + token[:, None] * k_s + channel[None, :] * k_d
    keys = tl.load(k + at, mask=seen, other=0.0).to(tl.float32)
    one_by_rms = tl.full((ROWS,), 1.0, tl.float32)
    if NORMALIZE:
        mean_square = tl.sum(keys * keys, axis=1) / width + eps
        one_by_rms = 1.0 / tl.sqrt(tl.where(mean_square > 0, mean_square, 1.0))
    out = head * tokens + token
    keys = (keys * one_by_rms[:, None]).to(unit.dtype.element_ty)
    tl.store(unit + out[:, None] * WIDTH + channel[None, :], keys)
    tl.store(reciprocal + out, one_by_rms)
    weight = tl.where(counts, 1.0, 0.0)
    if HAS_BETA:
        given = tl.load(beta + b * beta_b + token * beta_s + n * beta_n, mask=counts, other=0.0)
        weight = tl.where(counts, given.to(tl.float32), 0.0)
    tl.store(factor + out, weight)


@triton.jit
def load_right_sides(
    v,
    valid,
    right,
    s,
    heads,
    tokens,
    width,
    v_b,
    v_s,
    v_n,
    v_e,
    HAS_VALID: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STEP: tl.constexpr,
):
    """`right` (m, T, STEP), float32, gets v, or 0 at tokens that count for nothing."""
    head = tl.program_id(1).to(tl.int64)
    b, n = head // heads, head % heads
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    channel = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH).to(tl.int64)
    counts = token < s
    if HAS_VALID:
        counts = counts & (tl.load(valid + b * s + token, mask=counts, other=0) != 0)
    seen = counts[:, None] & (channel < width)[None, :]
    at = b * v_b + n * v_n + token[:, None] * v_s + channel[None, :] * v_e
    values = tl.load(v + at, mask=seen, other=0.0).to(tl.float32)
    tl.store(right + (head * tokens + token)[:, None] * STEP + channel[None, :], values)
