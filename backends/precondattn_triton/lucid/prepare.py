"""Preparation of a solve: normalised keys and β in the workspace.

    k̂ = k / rms(k),    rms(k) = √(mean(k²) + ε),  and 1 for a zero row where ε = 0

Padding becomes 0 without being read, so that it may contain NaN. Grid: one program per tile of
tokens and head.
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
    """Write k̂ to `unit` (m, T, WIDTH), 1 / rms to `reciprocal` and β or 0 to `factor` (m, T)."""
    head = tl.program_id(1).to(tl.int64)
    b, n = head // heads, head % heads
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    channel = tl.arange(0, WIDTH).to(tl.int64)
    is_valid = token < s
    if HAS_VALID:
        is_valid = is_valid & (tl.load(valid + b * s + token, mask=is_valid, other=0) != 0)
    mask = is_valid[:, None] & (channel < width)[None, :]
    at = b * k_b + n * k_n + token[:, None] * k_s + channel[None, :] * k_d
    keys = tl.load(k + at, mask=mask, other=0.0).to(tl.float32)
    one_by_rms = tl.full((ROWS,), 1.0, tl.float32)
    if NORMALIZE:
        mean_square = tl.sum(keys * keys, axis=1) / width + eps
        one_by_rms = 1.0 / tl.sqrt(tl.where(mean_square > 0, mean_square, 1.0))
    out = head * tokens + token
    keys = (keys * one_by_rms[:, None]).to(unit.dtype.element_ty)
    tl.store(unit + out[:, None] * WIDTH + channel[None, :], keys)
    tl.store(reciprocal + out, one_by_rms)
    weight = tl.where(is_valid, 1.0, 0.0)
    if HAS_BETA:
        beta_of_tokens = tl.load(
            beta + b * beta_b + token * beta_s + n * beta_n, mask=is_valid, other=0.0
        )
        weight = tl.where(is_valid, beta_of_tokens.to(tl.float32), 0.0)
    tl.store(factor + out, weight)
