"""Blocks of PaTH's chunks: their reflections as one matrix D × D, and keys carried past them.

A query x that enters a block of S tokens enters the preceding block as x P, with the product P of
all chunks' I − wᵀ U. For the chunks c of a block, from the last to the first, with A_c the product
of the chunks after c (`chunks.py`: K̃, w and U of a chunk),

    A_last = I,    K̂_c = K̃_c A_cᵀ,    A_{c−1} = A_c (I − w_cᵀ U_c),    P = A of the first chunk,
    with one more step.

Then x K̂ᵀ are the scores of x with all keys of the block: one product d wide per pair, and d² per
query and block for P, where chunks need 2 d per pair. Stored are C = P − I and A_c − I, which are
small where the reflections are weak, so that x + x C has x's own accuracy. Backward, from the first
chunk to the last, with Γ_c the gradient of A_c P_c, at first that of P,

    Γ_{c+1} = Γ_c P_cᵀ + dK̂_cᵀ K̃_c,

and with A_c and Γ_c the chunks' own gradients (`chunk_gradient.py`).

Grid of both kernels: one program per block of rows of P, block and key/value head; 3 d² products
per token each. The last block has no queries after it, and no matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from precondattn_triton.configurations import configuration
from precondattn_triton.launching import cdiv, launch
from precondattn_triton.path.chunk_gradient import BlockGradients
from precondattn_triton.path.chunks import PathChunks, rows_of
from precondattn_triton.precision import product_precision
from precondattn_triton.tiles import tile_of_program

SMALLEST = 128
"""The least tokens of a block: tiles of queries and of keys divide it."""

WIDEST = 128
"""The widest keys with blocks: a wider P does not fit the registers of a multiprocessor."""


class PathBlocks(NamedTuple):
    """The results of all blocks but the last one, in factor dtype."""

    size: int
    """S"""
    keys: torch.Tensor
    """K̂ (b n, blocks S, D)"""
    corrections: torch.Tensor
    """P − I (b n, blocks, D, D)"""
    after: torch.Tensor | None
    """A − I (b n, blocks S / C, D, D), if requested, as is w Aᵀ"""
    w_after: torch.Tensor | None
    """w Aᵀ (b n, blocks S, D)"""

    @property
    def number(self) -> int:
        return int(self.corrections.shape[1])


def block_size(tokens: int, chunk: int) -> int:
    """S for a call of `tokens` keys: a power of two near the geometric mean of T and C.

    Per query and channel, stored are S / 2C numbers for the chunks of its block, and T / 2S for the
    blocks before.
    """
    size = max(SMALLEST, 2 * chunk)
    while 2 * size * size <= tokens * chunk:
        size *= 2
    return size


@triton.jit
def matrix_of(array, index, WIDTH: tl.constexpr):
    """Load matrix `index` of (…, WIDTH, WIDTH)."""
    channels = tl.arange(0, WIDTH)
    at = channels[:, None] * WIDTH + channels[None, :]
    return tl.load(array + index * WIDTH * WIDTH + at)


@triton.jit
def _blocks(
    w, keys, u, keys_out, corrections, after, w_after,
    heads, tokens, blocks, per_block,
    PADDED_D: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = PADDED_D // WIDTH
    block_and_part, _, head = tile_of_program(blocks * PARTS, heads)
    block, part = block_and_part // PARTS, block_and_part % PARTS
    columns = tl.arange(0, PADDED_D)
    part_columns = part * WIDTH + tl.arange(0, WIDTH)
    at_part = part_columns[:, None] * PADDED_D + columns[None, :]
    kept = blocks * per_block
    FACTOR: tl.constexpr = keys.dtype.element_ty

    # A − I of the chunks after: its rows `part_columns`, which depend on no other rows.
    correction = tl.zeros((WIDTH, PADDED_D), tl.float32)
    for back in range(0, per_block):
        chunk = (block + 1) * per_block - 1 - back
        start = chunk * CHUNK
        factor = correction.to(FACTOR)
        if after is not None:
            tl.store(after + (head * kept + chunk) * PADDED_D * PADDED_D + at_part, factor)
        rows = (head * tokens + start + tl.arange(0, CHUNK))[:, None] * PADDED_D
        key_tile = tl.load(keys + rows + columns[None, :])
        moved = tl.dot(key_tile, tl.trans(factor), input_precision=PRECISION)
        key_part = tl.load(keys + rows + part_columns[None, :]).to(tl.float32)
        rows_out = (head * kept * CHUNK + start + tl.arange(0, CHUNK))[:, None] * PADDED_D
        at_out = rows_out + part_columns[None, :]
        tl.store(keys_out + at_out, (key_part + moved).to(FACTOR))
        w_tile = tl.load(w + rows + columns[None, :])
        left = tl.load(w + rows + part_columns[None, :]).to(tl.float32)
        left += tl.dot(w_tile, tl.trans(factor), input_precision=PRECISION)
        left = left.to(FACTOR)
        if w_after is not None:
            tl.store(w_after + at_out, left)
        u_tile = rows_of(u, head, tokens, start, CHUNK, PADDED_D)
        correction -= tl.dot(tl.trans(left), u_tile, input_precision=PRECISION)
    at_matrix = corrections + (head * blocks + block) * PADDED_D * PADDED_D
    tl.store(at_matrix + at_part, correction.to(FACTOR))


@triton.jit
def _blocks_gradient(
    w, keys, u, d_block_keys, d_matrices, d_after, u_after,
    heads, tokens, blocks, per_block,
    PADDED_D: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = PADDED_D // WIDTH
    block_and_part, _, head = tile_of_program(blocks * PARTS, heads)
    block, part = block_and_part // PARTS, block_and_part % PARTS
    columns = tl.arange(0, PADDED_D)
    part_columns = part * WIDTH + tl.arange(0, WIDTH)
    at_part = part_columns[:, None] * PADDED_D + columns[None, :]
    kept = blocks * per_block
    FACTOR: tl.constexpr = keys.dtype.element_ty

    # Rows `part_columns` of Γ, which depend on no other rows.
    gradient = tl.load(d_matrices + (head * blocks + block) * PADDED_D * PADDED_D + at_part)
    for step in range(0, per_block):
        chunk = block * per_block + step
        start = chunk * CHUNK
        factor = gradient.to(FACTOR)
        tl.store(d_after + (head * kept + chunk) * PADDED_D * PADDED_D + at_part, factor)
        u_tile = rows_of(u, head, tokens, start, CHUNK, PADDED_D)
        moved = tl.dot(factor, tl.trans(u_tile), input_precision=PRECISION).to(FACTOR)
        w_tile = rows_of(w, head, tokens, start, CHUNK, PADDED_D)
        gradient -= tl.dot(moved, w_tile, input_precision=PRECISION)
        rows = head * kept * CHUNK + start + tl.arange(0, CHUNK)
        at_rows = rows[:, None] * PADDED_D + part_columns[None, :]
        tl.store(u_after + at_rows, tl.trans(moved))
        d_carried = tl.load(d_block_keys + at_rows)
        key_tile = rows_of(keys, head, tokens, start, CHUNK, PADDED_D)
        gradient = tl.dot(
            tl.trans(d_carried.to(FACTOR)), key_tile, gradient, input_precision=PRECISION
        )


def path_blocks(
    chunks: PathChunks, s: int, like: torch.Tensor, *, with_after: bool
) -> PathBlocks | None:
    """The blocks of a call of s keys; None if one block has all keys, or if keys are too wide."""
    size = block_size(s, chunks.size)
    blocks = cdiv(s, size) - 1
    if blocks == 0 or chunks.w.shape[2] > WIDEST:
        return None
    return first_blocks(chunks, size, blocks, like, with_after=with_after)


def first_blocks(
    chunks: PathChunks, size: int, blocks: int, like: torch.Tensor, *, with_after: bool
) -> PathBlocks:
    """The first `blocks` blocks of `size` tokens."""
    w, keys, u, _, _ = chunks
    heads, tokens, width = w.shape
    per_block = size // chunks.size
    carried = keys.new_empty((heads, blocks * size, width))
    corrections = keys.new_empty((heads, blocks, width, width))
    after, w_after = None, None
    if with_after:
        after = keys.new_empty((heads, blocks * per_block, width, width))
        w_after = torch.empty_like(carried)
    tuned = configuration("path_blocks", width, keys.dtype == torch.bfloat16, keys)
    part = min(width, tuned.columns)
    launch(
        _blocks, (blocks * (width // part) * heads,),
        w, keys, u, carried, corrections, after, w_after, heads, tokens, blocks, per_block,
        PADDED_D=width, WIDTH=part, CHUNK=chunks.size, PRECISION=product_precision(like.dtype),
        num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
    return PathBlocks(size, carried, corrections, after, w_after)


def block_gradients(
    chunks: PathChunks,
    blocks: PathBlocks,
    d_keys: torch.Tensor,
    d_matrices: torch.Tensor,
    like: torch.Tensor,
) -> BlockGradients:
    """What the gradients of every chunk need, from dK̂ and dP in float32."""
    w, keys, u, _, _ = chunks
    heads, tokens, width = w.shape
    assert blocks.after is not None
    assert blocks.w_after is not None
    d_after, u_after = torch.empty_like(blocks.after), torch.empty_like(blocks.w_after)
    tuned = configuration("path_blocks", width, keys.dtype == torch.bfloat16, keys)
    part = min(width, tuned.columns)
    launch(
        _blocks_gradient, (blocks.number * (width // part) * heads,),
        w, keys, u, d_keys, d_matrices, d_after, u_after,
        heads, tokens, blocks.number, blocks.size // chunks.size,
        PADDED_D=width, WIDTH=part, CHUNK=chunks.size, PRECISION=product_precision(like.dtype),
        num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
    return BlockGradients(blocks.after, d_after, blocks.w_after, u_after, d_keys)
