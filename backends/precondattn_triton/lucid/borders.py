"""LUCID in PaTH's metric: the score of two keys as a dot product at a border between them.

    Φ_ij = e^{s ⟨i, j⟩ − s d},    ⟨i, j⟩ = k̂_iᵀ H_i … H_{j+1} k̂_j,    H_t = I − β_t w_t w_tᵀ

Two blocks of C 2^l tokens form a block of the next level, up to the whole sequence. Two tokens of
different chunks are in the two halves of exactly one such block, and the border in its middle is
between them. With x_i the later token carried back to the border as a query, and κ_j the earlier
token carried forward to it as a key,

    ⟨i, j⟩ = x_i · κ_j.

On every level, a token is on one side of one border, where one row z, x or κ, represents it. So the
kernels of LUCID's dot product can be used, with z instead of keys. From one level to the next, with
P the product of a block's reflections,

    x ← x P_first  in second halves,    κ ← κ P_secondᵀ  in first halves,    P ← P_second P_first,

2 d² products per token, for each of log₂ (T / C) levels. The lowest level comes from the chunks,
with the factors of `path/chunks.py` for q = k = k̂,

    S = k̂ k̂ᵀ − B Z R,    B = tril(k̂ wᵀ),    x = k̂ − B U,    κ = K̃,    P = I − wᵀ U,

where S are the scores within a chunk. Backward, the loop runs from the last level to the first,

    dP_first = xᵀ dx + P_secondᵀ dP,    dP_second = dκᵀ κ + dP P_firstᵀ,

then through the chunks. Memory holds, per token, z as an operand for each level, C numbers of S,
and 2 d² / C of P. Matrices C × d and d × d are multiplied by PyTorch's batched products.

A level has blocks of `half` tokens, and a border in the middle of every pair of blocks. With P the
product of the reflections of the other block, two kernels carry rows across it, and the gradient,

    cross         z = x,    x ← x P        cross_back    dx ← dx Pᵀ + dz
                  z = κ,    κ ← κ Pᵀ                     dκ ← dκ P + dz

If the other block is not complete, the sequence ends there, and rows need not cross it. Rows are
float32, (2, m, T, D): κ, then x; z (m, T, D) are operands of products, and dz is float32. Grid: one
program per tile of rows and head. 2 D² products per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from precondattn_triton.launching import cdiv, launch
from precondattn_triton.lucid import border_gradient as lucid_border_gradient
from precondattn_triton.lucid.plan import LucidPlan
from precondattn_triton.path.chunk_gradient import ChunkGradients, through_chunks
from precondattn_triton.path.chunks import PathChunks, path_chunks
from precondattn_triton.tiles import KernelMasks, heads, load_rows

PART = 32
"""Channels of a product that a program computes at once."""


@triton.jit
def other_side(rows, head, heads, tokens, start, half, WIDTH: tl.constexpr):
    """The address of x or κ of a tile's head, the block across the border, and whether it is x."""
    block = start // half
    is_query = block % 2
    return rows + (is_query * heads + head) * tokens * WIDTH, block + 1 - 2 * is_query, is_query


@triton.jit
def times_part(
    rows, whole, first, is_transposed,
    WIDTH: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Channels `first` … of rows P, or, transposed, of rows Pᵀ."""
    channels, columns = tl.arange(0, WIDTH), first + tl.arange(0, PART)
    if is_transposed:
        factor = tl.trans(tl.load(whole + columns[:, None] * WIDTH + channels[None, :]))
    else:
        factor = tl.load(whole + channels[:, None] * WIDTH + columns[None, :])
    return tl.dot(rows, factor.to(tl.float32), input_precision=PRECISION)


@triton.jit
def cross(
    rows, whole, at_border, tokens, half, blocks,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`whole` (m, blocks, D, D) is P of the complete blocks of the level."""
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    start = tl.program_id(0) * ROWS
    at_head, other, is_query = other_side(rows, head, heads, tokens, start, half, WIDTH)
    tile = load_rows(at_head, 0, tokens, start, ROWS, WIDTH, 0, WIDTH)
    token = (start + tl.arange(0, ROWS))[:, None].to(tl.int64)
    at = at_border + (head * tokens + token) * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(at, tile.to(at_border.dtype.element_ty))
    if other < blocks:
        # No thread may overwrite rows that another thread has not read yet.
        tl.debug_barrier()
        whole += (head * blocks + other) * WIDTH * WIDTH
        for first in range(0, WIDTH, PART):
            part = times_part(tile, whole, first, is_query == 0, WIDTH, PART, PRECISION)
            tl.store(at_head + token * WIDTH + first + tl.arange(0, PART)[None, :], part)


@triton.jit
def cross_back(
    d_rows, whole, d_at_border, tokens, half, blocks,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of `cross`: replace that of rows after it by that of rows before it."""
    head, heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    start = tl.program_id(0) * ROWS
    at_head, other, is_query = other_side(d_rows, head, heads, tokens, start, half, WIDTH)
    tile = load_rows(at_head, 0, tokens, start, ROWS, WIDTH, 0, WIDTH)
    token = (start + tl.arange(0, ROWS))[:, None].to(tl.int64)
    # No thread may overwrite rows that another thread has not read yet.
    tl.debug_barrier()
    if other < blocks:
        whole += (head * blocks + other) * WIDTH * WIDTH
    for first in range(0, WIDTH, PART):
        at = token * WIDTH + first + tl.arange(0, PART)[None, :]
        d_part = tl.load(d_at_border + head * tokens * WIDTH + at)
        if other < blocks:
            d_part += times_part(tile, whole, first, is_query == 1, WIDTH, PART, PRECISION)
        tl.store(at_head + at, d_part)


class LucidBorders(NamedTuple):
    """The rows and products at all borders of one call."""

    unit: Tensor
    """k̂ (b, s, n, d)"""
    path_beta: Tensor
    """β of the reflections (b, s, n)"""
    chunks: PathChunks
    chunk_scores: Tensor
    """S (m, T, C), float32"""
    keys: Tensor
    """z (levels, m, T, D)"""
    products: list[Tensor]
    """P of the complete blocks (m, blocks, D, D) of every level but the last, in the dtype of z"""
    rows: Tensor
    """κ and x at the borders of the last level (2, m, T, D), float32, or x at the first token"""

    def level(self, half: int) -> int:
        """The level whose blocks have `half` tokens."""
        return (half // self.chunks.size).bit_length() - 1


def borders_of(
    plan: LucidPlan,
    unit: Tensor,
    x: Mapping[str, Tensor],
    masks: KernelMasks,
    *,
    with_inverse: bool,
    to_start: bool = False,
) -> LucidBorders:
    """Borders of a call: k̂ (m, T, D), 0 for invalid tokens and padding; w and β (b, s, n, …).

    `to_start` carries all rows x back to the first token.
    """
    by_token = unit.view(plan.b, plan.n, plan.tokens, plan.key_width).transpose(1, 2)
    k = by_token[:, : plan.s, :, : plan.d]
    chunking = plan.reflections._replace(rows=plan.path_chunk)
    chunks = path_chunks(
        k, x["w"].to(unit.dtype), x["beta"], masks,
        with_inverse=with_inverse, configuration=chunking, tokens=plan.tokens,
    )  # fmt: skip
    w, u, zr = (_stack(a, chunks) for a in (chunks.w, chunks.u, chunks.zr))
    stacked = _stack(unit, chunks)
    b = (stacked @ w.mT).tril()
    chunk_scores = torch.baddbmm(stacked @ stacked.mT, b, zr, alpha=-1)
    chunk_scores = chunk_scores.view(plan.heads, plan.tokens, chunks.size)
    rows = torch.stack((chunks.keys, torch.baddbmm(stacked, b, u, alpha=-1).view_as(chunks.keys)))
    whole = torch.eye(w.shape[2], device=w.device) - w.mT @ u
    products = [whole.to(plan.dtype).unflatten(0, (plan.heads, -1))]
    levels = (cdiv(plan.tokens, chunks.size) - 1).bit_length()
    keys = unit.new_empty((levels, *unit.shape))
    for level in range(levels):
        half, is_last = chunks.size << level, level == levels - 1
        launch(
            cross, (plan.tokens // plan.reflections.rows, plan.heads),
            rows, products[level], keys[level], plan.tokens, half,
            0 if is_last and not to_start else plan.tokens // half, **_crossing(plan),
        )  # fmt: skip
        if not is_last:
            first, second = _halves(products[level])
            products.append(second @ first)
    return LucidBorders(k, x["beta"], chunks, chunk_scores, keys, products, rows)


class BorderGradients(NamedTuple):
    """The gradients of the inputs of `borders_of`, float32."""

    unit: Tensor
    """dk̂ (m, T, D)"""
    w: Tensor
    """(m, T, D)"""
    path_beta: Tensor
    """(m, T)"""


def borders_gradient(
    plan: LucidPlan, borders: LucidBorders, unit: Tensor, masks: KernelMasks,
    segments: Tensor | None, y: Tensor, d_v: Tensor,
) -> BorderGradients:  # fmt: skip
    """Gradients from y and dv (b, s, n, e), 0 for invalid tokens; segments are (b, 2, T)."""
    d_rows = unit.new_zeros((2, *unit.shape), dtype=torch.float32)
    d_keys = torch.empty_like(d_rows[0])
    d_products = None
    scores = {
        "WIDTH": plan.chunk, "CHUNKS": plan.chunks,
        "PRECISION": plan.precision,
        "num_warps": plan.gradient.warps, "num_stages": plan.gradient.stages,
    }  # fmt: skip
    sizes = plan.s, plan.n, plan.tokens, plan.e
    factors = *plan.score_factors, plan.scale
    levels = len(borders.keys)
    for level in reversed(range(levels)):
        half, blocks = borders.chunks.size << level, 0
        rows, columns = (min(tile, half) for tile in plan.gradient[:2])
        launch(
            lucid_border_gradient.at_border, (plan.tokens // rows, plan.heads),
            borders.keys[level], segments, heads(y), heads(d_v), d_keys, *sizes, half, *factors,
            TILE=rows, COLUMNS=columns, KEY_WIDTH=plan.key_width, **scores,
        )  # fmt: skip
        if level < levels - 1:
            blocks = plan.tokens // half
            d_products = _products_gradient(borders, level, d_rows, d_products)
        launch(
            cross_back, (plan.tokens // plan.reflections.rows, plan.heads),
            d_rows, borders.products[level], d_keys, plan.tokens, half, blocks, **_crossing(plan),
        )  # fmt: skip
    d_scores = torch.empty_like(borders.chunk_scores)
    rows, columns = (min(tile, borders.chunks.size) for tile in plan.gradient[:2])
    launch(
        lucid_border_gradient.within, (plan.tokens // rows, plan.heads),
        borders.chunk_scores, segments, heads(y), heads(d_v), d_scores, *sizes, *factors,
        TILE=rows, COLUMNS=columns, CHUNK=borders.chunks.size, **scores,
    )  # fmt: skip
    if d_products is None:  # There was at most one level, so no row crossed a block.
        d_products = torch.zeros_like(borders.products[0], dtype=torch.float32)
    return _from_chunks(borders, unit, masks, d_scores, d_rows, d_products.flatten(0, 1))


def _products_gradient(
    borders: LucidBorders, level: int, d_rows: Tensor, d_next: Tensor | None
) -> Tensor:
    """dP of a level (m, blocks, D, D), from rows after its borders and dP of the next level."""
    half = borders.chunks.size << level
    z, products = borders.keys[level].float(), borders.products[level].float()
    d_products = torch.zeros_like(products)
    d_first, d_second = _halves(d_products)
    end = 2 * half * d_first.shape[1]
    z_first, z_second = _halves(z[:, :end].unflatten(1, (-1, half)))
    d_key, d_query = (
        halves[side]
        for side, halves in enumerate(_halves(d[:, :end].unflatten(1, (-1, half))) for d in d_rows)
    )
    d_first += z_second.mT @ d_query
    d_second += d_key.mT @ z_first
    if d_next is not None:
        first, second = _halves(products)
        d_second += d_next @ first.mT
        d_first += second.mT @ d_next
    if z.shape[1] > end + half:  # The last pair has an incomplete second block.
        d_products[:, -1] = z[:, end + half :].mT @ d_rows[1, :, end + half :]
    return d_products


def _from_chunks(
    borders: LucidBorders,
    unit: Tensor,
    masks: KernelMasks,
    d_scores: Tensor,
    d_rows: Tensor,
    d_products: Tensor,
) -> BorderGradients:
    """The gradients through S, x, κ and P of every chunk."""
    chunks = borders.chunks
    w, u, zr, stacked, d_s, d_keys, d_x = (
        _stack(a, chunks) for a in (chunks.w, chunks.u, chunks.zr, unit, d_scores, *d_rows)
    )
    b = (stacked @ w.mT).tril()
    d_b = -torch.baddbmm(d_x @ u.mT, d_s, zr.mT).tril()
    d_k = torch.baddbmm(d_x, d_s + d_s.mT, stacked).baddbmm(d_b, w)
    d_chunks = ChunkGradients(d_k, d_b.mT @ stacked, -b.mT @ d_x, -b.mT @ d_s, d_keys, d_products)
    gradients = through_chunks(borders.unit, borders.path_beta, chunks, masks, d_chunks)
    return BorderGradients(*(d.reshape(*unit.shape[:2], *d.shape[2:]) for d in gradients))


def _crossing(plan: LucidPlan) -> dict[str, int | str]:
    tuned = plan.reflections
    return {
        "ROWS": tuned.rows, "WIDTH": plan.key_width,
        "PART": min(PART, plan.key_width),
        "PRECISION": plan.precision, "num_warps": tuned.warps, "num_stages": tuned.stages,
    }  # fmt: skip


def _stack(rows: Tensor, chunks: PathChunks) -> Tensor:
    """Rows (m, T, …) as (m chunks, C, …), float32."""
    return rows.reshape(-1, chunks.size, rows.shape[2]).float()


def _halves(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second blocks of all complete pairs of (m, blocks, …)."""
    pairs = blocks[:, : blocks.shape[1] // 2 * 2]
    return pairs[:, 0::2], pairs[:, 1::2]
