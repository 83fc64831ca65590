"""PaTH forward: o = softmax(s A + mask) v,  A_ij = q_iᵀ H_i H_{i−1} … H_{j+1} k_j,  as in flash
attention, with queries that are reflected between tiles of keys; H_t = I − β_t w_t w_tᵀ.

Grid: one program per tile of ROWS queries x, head and sequence. It loops over chunks of keys
(`chunks.py`) from the last that it attends to, to the first of its block, and then over the blocks
before (`blocks.py`). In chunks that contain some of the queries, with B = tril(x wᵀ):

    S = x kᵀ − B Z R,    x ← x − B U;

in the chunks of the block before the tile, and in the blocks before, of which one has S tokens:

    S = x K̃ᵀ,    x ← x − (x wᵀ) U;        S = x K̂ᵀ,    x ← x + x C;

with online softmax over the tiles S (`softmax/score_tiles.py`). x is kept in float32. Products per
head, in units of t² / 2: d for the scores, d² / S for the reflections, e for the values; and within
blocks, in units of t S / 2, 2 d for the reflections. Registers hold x and the accumulator; k, v, w,
K̃, U, K̂ and C are read once per tile of queries. In a step, x is stored as it has passed all
reflections, beside o: the keys before the last flush have had theirs (`cached_keys.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from precondattn.kernel_backend.limits import padded_width
from precondattn_triton.launching import cdiv, launch
from precondattn_triton.path.blocks import PathBlocks, matrix_of
from precondattn_triton.path.chunks import PathChunks, rows_of
from precondattn_triton.precision import product_precision, splits_weights
from precondattn_triton.softmax.score_tiles import mean_and_log, with_tile
from precondattn_triton.tiles import (
    LOG2_E,
    KernelMasks,
    configured,
    is_token,
    load_tile,
    may_attend,
    store_tile,
    tile_of_program,
)


class PathResults(NamedTuple):
    """The results of the forward kernel."""

    out: torch.Tensor
    """o (b, t, h, e), in the dtype of v"""
    full: torch.Tensor
    """o in float32: `out` itself if that is float32"""
    log_total: torch.Tensor
    """λ (b, h, t), float32"""


@triton.jit
def scores_within_chunk(x, k_tile, w_tile, zr, is_before, PRECISION: tl.constexpr):
    """x kᵀ − B Z R and B, for queries of which some are in the chunk."""
    b = tl.dot(x, tl.trans(w_tile), input_precision=PRECISION)
    b = tl.where(is_before, b, 0.0).to(x.dtype)
    scores = tl.dot(x, tl.trans(k_tile), input_precision=PRECISION)
    return scores - tl.dot(b, zr, input_precision=PRECISION), b


@triton.jit
def path_may_attend(row, column, is_key, batch, t, s, segment, window, HAS_WINDOW: tl.constexpr):
    """The attention mask: query `row` of t may attend to key `column` of s."""
    mask = may_attend(row, column, is_key, batch, t, s, segment, True)
    if HAS_WINDOW:
        mask = mask & (column > row + (s - t) - window)
    return mask


@triton.jit
def first_key(position, batch, s, segment, window, HAS_WINDOW: tl.constexpr):
    """The first key that the query at a position among the keys may attend to, before masks."""
    begin = position * 0
    if segment is not None:
        begin = tl.load(segment + batch * 2 * s + position)
    if HAS_WINDOW:
        begin = tl.maximum(begin, position - window + 1)
    return begin


@triton.jit
def _forward(
    q, k, v, w, keys, u, zr, block_keys, corrections, out, full, log_total,
    q_valid, k_valid, segment,
    scale, window, t, s, h, n, tokens, size, blocks,
    q_batch, q_token, q_head, q_channel, k_batch, k_token, k_head, k_channel,
    v_batch, v_token, v_head, v_channel,
    HAS_WINDOW: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_E: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, TWO_PARTS: tl.constexpr, IS_STEP: tl.constexpr,
):  # fmt: skip
    tile, batch, head = tile_of_program(tl.cdiv(t, ROWS), h)
    kv = head // (h // n)
    kv_index = batch * n + kv
    rows = tile * ROWS + tl.arange(0, ROWS)
    is_row = is_token(q_valid, batch, rows, t)
    x = load_tile(
        q + batch * q_batch + head * q_head, rows, is_row, q_token, q_channel, D, PADDED_D
    ).to(tl.float32)
    k += batch * k_batch + kv * k_head
    v += batch * v_batch + kv * v_head
    FACTOR: tl.constexpr = keys.dtype.element_ty

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, PADDED_E), tl.float32)
    past = s - t
    first = tile * ROWS + past
    first_keys = first_key(tl.minimum(rows + past, s - 1), batch, s, segment, window, HAS_WINDOW)
    # Chunks that contain some of these queries; all earlier chunks precede every query.
    own_first = first // CHUNK
    own_end = tl.cdiv(tl.minimum(first + ROWS, s), CHUNK)
    for back in range(0, own_end - own_first):
        start = (own_end - 1 - back) * CHUNK
        columns = start + tl.arange(0, CHUNK)
        is_key = is_token(k_valid, batch, columns, s)
        k_tile = load_tile(k, columns, is_key, k_token, k_channel, D, PADDED_D).to(FACTOR)
        w_tile = rows_of(w, kv_index, tokens, start, CHUNK, PADDED_D)
        is_before = columns[None, :] <= rows[:, None] + past
        zr_tile = rows_of(zr, kv_index, tokens, start, CHUNK, CHUNK)
        scores, b = scores_within_chunk(x.to(FACTOR), k_tile, w_tile, zr_tile, is_before, PRECISION)
        u_tile = rows_of(u, kv_index, tokens, start, CHUNK, PADDED_D)
        x -= tl.dot(b, u_tile, input_precision=PRECISION)
        mask = is_before & is_key[None, :]
        if segment is not None or HAS_WINDOW:
            mask = mask & (columns[None, :] >= first_keys[:, None])
        scores = tl.where(mask, scores * (scale * LOG2_E), float("-inf"))
        values = load_tile(v, columns, is_key, v_token, v_channel, E, PADDED_E).to(FACTOR)
        largest, total, acc = with_tile(largest, total, acc, scores, values, PRECISION, TWO_PARTS)

    IS_MASKED: tl.constexpr = HAS_WINDOW or k_valid is not None or segment is not None
    begin = tl.maximum(first_key(first, batch, s, segment, window, HAS_WINDOW), 0)
    of_block = first // size * size
    last = tl.minimum(tl.maximum(begin, of_block) // CHUNK, own_first)
    for back in range(0, own_first - last):
        start = (own_first - 1 - back) * CHUNK
        columns = start + tl.arange(0, CHUNK)
        is_key = is_token(k_valid, batch, columns, s)
        factor = x.to(FACTOR)
        carried = rows_of(keys, kv_index, tokens, start, CHUNK, PADDED_D)
        scores = tl.dot(factor, tl.trans(carried), input_precision=PRECISION) * (scale * LOG2_E)
        w_tile = rows_of(w, kv_index, tokens, start, CHUNK, PADDED_D)
        b = tl.dot(factor, tl.trans(w_tile), input_precision=PRECISION).to(FACTOR)
        u_tile = rows_of(u, kv_index, tokens, start, CHUNK, PADDED_D)
        x -= tl.dot(b, u_tile, input_precision=PRECISION)
        if IS_MASKED:
            mask = is_key[None, :] & (columns[None, :] >= first_keys[:, None])
            scores = tl.where(mask, scores, float("-inf"))
        values = load_tile(v, columns, is_key, v_token, v_channel, E, PADDED_E).to(FACTOR)
        largest, total, acc = with_tile(largest, total, acc, scores, values, PRECISION, TWO_PARTS)

    if corrections is not None:
        for back in range(0, of_block // size - begin // size):
            block = of_block // size - 1 - back
            factor = x.to(FACTOR)
            end = (block + 1) * size
            first_column = tl.maximum(begin, block * size) // COLUMNS * COLUMNS
            for column in range(first_column, end, COLUMNS):
                columns = column + tl.arange(0, COLUMNS)
                is_key = is_token(k_valid, batch, columns, s)
                carried = rows_of(block_keys, kv_index, blocks * size, column, COLUMNS, PADDED_D)
                if block_keys.dtype.element_ty == tl.float32:
                    # Always true: x is split for its products anew, which costs fewer registers.
                    factor = tl.where(column < end, x, 0.0)
                scores = tl.dot(factor, tl.trans(carried), input_precision=PRECISION)
                scores *= scale * LOG2_E
                if IS_MASKED:
                    mask = is_key[None, :] & (columns[None, :] >= first_keys[:, None])
                    scores = tl.where(mask, scores, float("-inf"))
                values = load_tile(v, columns, is_key, v_token, v_channel, E, PADDED_E).to(FACTOR)
                largest, total, acc = with_tile(
                    largest, total, acc, scores, values, PRECISION, TWO_PARTS
                )
            correction = matrix_of(corrections, kv_index * blocks + block, PADDED_D)
            x = tl.dot(factor, correction, x, input_precision=PRECISION)

    if IS_STEP:
        # One array has both: another pointer would cost registers.
        STEP: tl.constexpr = PADDED_D + PADDED_E
        out += (batch * h + head) * t * STEP
        store_tile(out, rows, rows < t, STEP, x, PADDED_D)
    o, logs = mean_and_log(largest, total, acc, is_row)
    tl.store(log_total + (batch * h + head) * t + rows, logs, mask=rows < t)
    if IS_STEP:
        store_tile(out + PADDED_D, rows, rows < t, STEP, o, PADDED_E)
    else:
        start = (batch * t * h + head) * E
        store_tile(out + start, rows, rows < t, h * E, o, E)
        if full is not None:
            store_tile(full + start, rows, rows < t, h * E, o, E)


def path_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    chunks: PathChunks,
    blocks: PathBlocks | None,
    masks: KernelMasks,
    *,
    scale: float,
    window: int | None,
    is_step: bool = False,
) -> PathResults:
    """q (b, t, h, d), k (b, s, n, d) and v (b, s, n, e) have the same dtype.

    In a step `out` is (b, h, t, D + E), float32: the queries as they have passed all reflections,
    then o, in padded widths.
    """
    b, t, h, d = q.shape
    s, n, e = v.shape[1:]
    width, value_width = padded_width(d), padded_width(e)
    if is_step:
        out = v.new_empty((b, h, t, width + value_width), dtype=torch.float32)
    else:
        out = v.new_empty((b, t, h, e))
    full = None if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    log_total = v.new_empty((b, h, t), dtype=torch.float32)
    tuned = configured("path_forward", q, v)
    of_blocks = (None, None) if blocks is None else (blocks.keys, blocks.corrections)
    tokens = chunks.number * chunks.size
    size, number = (tokens, 1) if blocks is None else (blocks.size, blocks.number)
    launch(
        _forward, (cdiv(t, tuned.rows) * b * h,),
        q, k, v, *chunks[:4], *of_blocks, out, full, log_total,
        *masks, scale, window or 0, t, s, h, n, tokens, size, number,
        *q.stride(), *k.stride(), *v.stride(),
        HAS_WINDOW=window is not None, D=d, E=e,
        PADDED_D=width, PADDED_E=value_width,
        ROWS=tuned.rows, COLUMNS=tuned.columns, CHUNK=chunks.size,
        PRECISION=product_precision(v.dtype), TWO_PARTS=splits_weights(v.dtype), IS_STEP=is_step,
        num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
    return PathResults(out, out if full is None else full, log_total)
