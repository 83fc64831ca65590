"""New tokens of LUCID in PaTH's metric after a cache: from the cache's buffers to launches.

Tokens since the last flush, which are pending, and the new ones are those of a matrix with borders
(`borders.py`), in which y of the pending ones is known (`extension.py`). All of these come after
the flush, up to which the other cached keys have been transported. With x_i the normalised new key
carried back to the flush through all reflections since, and r_j = rms(k_j) that of the original
key, the sums over these keys are products, with no reflection between tiles (`flushed_sums`),

    P_i = Σ_j Φ_ij y_j,    Φ_ij = e^{s x_i · κ_j / r_j − s d},

which are subtracted from the right sides:

    (I + diag(β) stril(Φ_new,new)) y_new = diag(β) (v_new − P − Φ_new,pending y_pending)

A part of the keys has its own sums, which are added in order. The cache is read once for each tile
of new tokens, and not copied. Grid: one program per tile of rows, head, and part and block of
channels of y. c (d + e) products for each new token of a key/value head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from precondattn.cache import Append, Updates
from precondattn.frame import Frame
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.transported import Transported
from precondattn_triton.configurations import configuration
from precondattn_triton.decoding import splits_of
from precondattn_triton.launching import launch
from precondattn_triton.lucid.borders import borders_of
from precondattn_triton.lucid.extension import ExtendedMatrix, KnownTokens
from precondattn_triton.path.extension import RecentTokens, advanced, recent_tokens
from precondattn_triton.softmax.score_tiles import add_product
from precondattn_triton.tiles import (
    addresses,
    bytes_of,
    heads,
    is_token,
    load_channels,
    load_rows,
    start_of,
)


@triton.jit(do_not_specialize=["count", "first_row", "tokens"])
def flushed_sums(
    rows, keys, norms, solved, lengths, valid, sums,
    count, heads, tokens, first_row, flush, per_part, scale, shift, width,
    D: tl.constexpr, KEY_WIDTH: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr, TWO_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write P of the rows from `first_row` on to `sums` (parts, m, tokens − first_row, STEP).

    `rows` are x (m, tokens, KEY_WIDTH), `keys` κ (b, c, n, D), `norms` r (b, c, n) or None, and
    `solved` y (b, c, n, width), of which the first `count` slots may be read; `valid` (b, count).
    """
    CHANNELS: tl.constexpr = STEP // WIDTH
    FACTOR: tl.constexpr = tl.float16 if HALF else tl.float32
    index = tl.program_id(1).to(tl.int64)
    batch, head = index // heads, index % heads
    part, first = tl.program_id(2) // CHANNELS, tl.program_id(2) % CHANNELS * WIDTH
    row = tl.program_id(0) * ROWS
    x = load_rows(rows, index, tokens, first_row + row, ROWS, KEY_WIDTH, 0, KEY_WIDTH).to(FACTOR)
    key_start, solved_start = start_of(keys, batch, head), start_of(solved, batch, head)
    length = tl.load(lengths + batch)
    low = part * per_part
    high = tl.minimum(tl.minimum(low + per_part, length - length % flush), count)
    channels = first + tl.arange(0, WIDTH)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(low, high, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        is_key = (columns < high) & is_token(valid, batch, columns, count)
        key_tile = load_channels(keys, key_start, columns, is_key, D, KEY_WIDTH)
        if norms is not None:
            at = start_of(norms, batch, head) + columns.to(tl.int64) * norms.token
            norm = tl.load(at, mask=is_key, other=1.0)
            key_tile = key_tile.to(tl.float32) / tl.where(norm > 0, norm, 1.0)[:, None]
        scores = tl.dot(x, tl.trans(key_tile.to(FACTOR)), input_precision=PRECISION)
        phi_tile = tl.where(is_key[None, :], tl.exp2(scores * scale - shift), 0.0)
        # Slots that are not valid may contain NaN.
        inside = is_key[:, None] & (channels < width)[None, :]
        at = addresses(solved_start, columns, solved.token, channels, solved.channel)
        values = tl.load(at, mask=inside, other=0.0)
        total = add_product(phi_tile, values, total, PRECISION, TWO_PARTS)
    row += (part * tl.num_programs(1) + index) * (tokens - first_row) + tl.arange(0, ROWS)
    tl.store(sums + row[:, None] * STEP + channels[None, :], total)


class SolvedTokens(NamedTuple):
    """The result of a step of the solve."""

    y: Tensor
    """(b, t, n, e)"""
    norms: Tensor | None
    """rms(k) of the new tokens (b, t, n), float32, if it is cached"""
    recent: RecentTokens
    """The tokens that are not flushed before the step, with y as their values"""


def solve_new_tokens(
    leaf: LucidSolve, past: Mapping[str, Tensor], x: Mapping[str, Tensor], frame: Frame
) -> SolvedTokens:
    """y of the new tokens; `past` is by slot."""
    flush = flush_of(leaf)
    recent = recent_tokens(flush, {**past, "value": past["solved"]}, x, frame)
    pending = recent.pending
    old = recent.valid if recent.valid is None else recent.valid[:, :pending]
    new = recent.valid if recent.valid is None else recent.valid[:, pending:]
    cached = KnownTokens(recent.k[:, :pending], recent.v[:, :pending], old)
    matrix = ExtendedMatrix(leaf, cached, x, new)
    reflections = {
        name: matrix.after_known(x[name], old_rows[:, :pending])
        for name, old_rows in (("w", recent.w), ("beta", recent.beta))
    }
    matrix.borders = borders_of(
        matrix.plan, matrix.prepared.keys, reflections, matrix.masks,
        with_inverse=False, to_start=True,
    )  # fmt: skip
    y, norms = matrix.new_rows(_right_sides(matrix, flush, past, frame, recent))
    return SolvedTokens(y, norms, recent)


def extend(
    leaf: LucidSolve, past: Mapping[str, Tensor], x: Mapping[str, Tensor], frame: Frame
) -> tuple[Tensor, Updates]:
    """y of the new tokens (b, t, n, e), and the updates of the buffers, by slot."""
    y, norms, recent = solve_new_tokens(leaf, past, x, frame)
    updates: Updates = {"solved": Append(y), **advanced(flush_of(leaf), past, frame, recent)}
    return y, updates if norms is None else {**updates, "rms": Append(norms)}


def flush_of(leaf: LucidSolve) -> int:
    """The number of tokens between two flushes of the cached keys."""
    assert isinstance(leaf.metric, Transported)
    return leaf.metric.flush


def _right_sides(
    matrix: ExtendedMatrix,
    flush: int,
    past: Mapping[str, Tensor],
    frame: Frame,
    recent: RecentTokens,
) -> Tensor:
    """v − P of the new tokens (b, t, n, e): v itself if no token is flushed, else float32."""
    plan, cached, v, borders = matrix.plan, matrix.cached, matrix.new["v"], matrix.borders
    keys, solved = past["key"], past["solved"]
    norms = heads(past["rms"][..., None]) if "rms" in past else None
    count = keys.shape[1] if frame.held is None else frame.held - recent.pending
    if count == 0:
        return v
    assert borders is not None
    valid = None
    if frame.held is None:
        assert frame.k_valid is not None  # An extension always has the validity of slots.
        valid = bytes_of(frame.k_valid[:, :count], plan.b)
    tuned = configuration("path_forward", max(plan.key_width, plan.chunk), plan.half, v)
    rows = min(tuned.rows, plan.unit)
    tiles = (plan.tokens - cached) // rows
    programs = tiles * plan.heads * plan.chunks
    parts, per_part = splits_of(v, count, programs, tuned.columns)
    sums = borders.rows.new_empty((parts, plan.heads, plan.tokens - cached, plan.step))
    launch(
        flushed_sums, (tiles, plan.heads, parts * plan.chunks),
        borders.rows[1], heads(keys), norms, heads(solved), recent.lengths, valid, sums,
        count, plan.n, plan.tokens, cached, flush, per_part, *plan.score_factors, plan.e,
        D=plan.d, KEY_WIDTH=plan.key_width, WIDTH=plan.chunk, STEP=plan.step,
        ROWS=rows, COLUMNS=tuned.columns, HALF=plan.half, TWO_PARTS=v.dtype == torch.bfloat16,
        PRECISION=plan.precision, num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
    by_head = sums.sum(0).view(plan.b, plan.n, -1, plan.step)[:, :, : v.shape[1], : plan.e]
    return v.float() - by_head.transpose(1, 2)
