"""Chunks of PaTH's reflections: H_t = I − β_t w_t w_tᵀ, C tokens at a time.

Within a chunk, with G = stril(w wᵀ) and R = stril(w kᵀ),

    M = (I + diag(β) G)⁻¹,    Z = M diag(β),    U = Z w,    K̃ = k − (Z R)ᵀ w.

A query x after the chunk has the scores x K̃ᵀ with its keys, and enters the preceding chunk as
x − (x wᵀ) U, which applies all reflections of the chunk in order. A query within the chunk has
B = tril(x wᵀ) instead of x wᵀ, the scores x kᵀ − B Z R, and leaves the chunk as x − B U. Segments
need no mask here: all tokens between two tokens of a segment belong to that segment.

Grid: one program per chunk and key/value head. 2 C² d products for each of G, R, U and K̃, and
(4/3) C³ log C for M, whose entries have magnitude at most 2 for unit w and β in [0, 2]. All results
are stored as rows (b n, T, ·), with T the tokens padded to whole chunks; padding and invalid tokens
have w = 0 and β = 0, so that they reflect nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from precondattn.kernel_backend.limits import padded_width
from precondattn_triton.configurations import Configuration
from precondattn_triton.launching import cdiv, launch
from precondattn_triton.precision import exact, product_precision
from precondattn_triton.tiles import (
    KernelMasks,
    configured,
    factor_dtype,
    heads,
    is_token,
    load_channels,
    start_of,
    tile_of_program,
)
from precondattn_triton.triangular_inverse import unit_lower_inverse


class PathChunks(NamedTuple):
    """The results of all chunks: w, K̃ and U padded to the tile width; all but M in factor dtype."""

    w: torch.Tensor
    """(b n, T, D)"""
    keys: torch.Tensor
    """K̃ (b n, T, D)"""
    u: torch.Tensor
    """(b n, T, D)"""
    zr: torch.Tensor
    """Z R (b n, T, C)"""
    inverse: torch.Tensor | None
    """M (b n, T, C), float32, if requested"""

    @property
    def size(self) -> int:
        """C"""
        return int(self.zr.shape[2])

    @property
    def number(self) -> int:
        return int(self.zr.shape[1]) // self.size


@triton.jit
def rows_of(array, head, tokens, start, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows `start` … of a head of (heads, tokens, WIDTH), without bounds."""
    rows = head * tokens + start + tl.arange(0, COUNT)
    return tl.load(array + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])


@triton.jit
def store_rows(array, head, tokens, start, tile):
    """Store a tile as rows `start` … of a head of (heads, tokens, width of the tile)."""
    WIDTH: tl.constexpr = tile.shape[1]
    rows = head * tokens + start + tl.arange(0, tile.shape[0])
    at = array + rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(at, tile.to(array.dtype.element_ty))


@triton.jit
def _chunks(
    k, w, beta, k_valid, w_out, keys, u, zr, inverse, s, n, chunks,
    D: tl.constexpr, PADDED_D: tl.constexpr, CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    chunk, batch, head = tile_of_program(chunks, n)
    start = chunk * CHUNK
    tokens = start + tl.arange(0, CHUNK)
    is_present = is_token(k_valid, batch, tokens, s)
    k_start, w_start = start_of(k, batch, head), start_of(w, batch, head)
    at = start_of(beta, batch, head) + tokens.to(tl.int64) * beta.token
    strength = tl.load(at, mask=is_present, other=0.0).to(tl.float32)[:, None]

    # A block of channels at a time; blocks are loaded again when they are needed again.
    overlap = tl.zeros((CHUNK, CHUNK), tl.float32)
    right = tl.zeros((CHUNK, CHUNK), tl.float32)
    for first in range(0, PADDED_D, CHANNELS):
        w_part = load_channels(w, w_start, tokens, is_present, D, CHANNELS, first)
        k_part = load_channels(k, k_start, tokens, is_present, D, CHANNELS, first)
        overlap = tl.dot(w_part, tl.trans(w_part), overlap, input_precision=PRECISION)
        right = tl.dot(w_part, tl.trans(k_part), right, input_precision=PRECISION)
    inverse_tile = unit_lower_inverse(strength * overlap, CHUNK, LEVELS, EXACT)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    right = tl.where(j < i, strength * right, 0.0)
    through = tl.dot(inverse_tile, right, input_precision=PRECISION)

    head_index, count = batch * n + head, chunks * CHUNK
    store_rows(zr, head_index, count, start, through)
    if inverse is not None:
        store_rows(inverse, head_index, count, start, inverse_tile)
    for first in range(0, PADDED_D, CHANNELS):
        w_part = load_channels(w, w_start, tokens, is_present, D, CHANNELS, first)
        k_part = load_channels(k, k_start, tokens, is_present, D, CHANNELS, first)
        channels = first + tl.arange(0, CHANNELS)
        at_part = (head_index * count + tokens)[:, None] * PADDED_D + channels[None, :]
        tl.store(w_out + at_part, w_part.to(w_out.dtype.element_ty))
        directions = w_part.to(tl.float32)
        moved = tl.dot(inverse_tile, strength * directions, input_precision=PRECISION)
        tl.store(u + at_part, moved.to(u.dtype.element_ty))
        carried = tl.dot(tl.trans(through), directions, input_precision=PRECISION)
        tl.store(keys + at_part, (k_part.to(tl.float32) - carried).to(keys.dtype.element_ty))


def path_chunks(
    k: torch.Tensor,
    w: torch.Tensor,
    beta: torch.Tensor,
    masks: KernelMasks,
    *,
    with_inverse: bool,
    configuration: Configuration | None = None,
    tokens: int | None = None,
) -> PathChunks:
    """The chunks of k and w (b, s, n, d) and β (b, s, n), padded to `tokens` if not None."""
    b, s, n, d = k.shape
    tuned = configuration or chunking(k)
    size, width = tuned.rows, padded_width(d)
    count = cdiv(tokens or s, size)
    shape = b * n, count * size
    dtype = factor_dtype(k.dtype)
    w_out, keys, u = (k.new_empty((*shape, width), dtype=dtype) for _ in range(3))
    zr = k.new_empty((*shape, size), dtype=dtype)
    inverse = torch.empty_like(zr, dtype=torch.float32) if with_inverse else None
    result = PathChunks(w_out, keys, u, zr, inverse)
    launch(
        _chunks, (count * b * n,),
        heads(k), heads(w), heads(beta[..., None]), masks.k_valid, *result, s, n, count,
        D=d, PADDED_D=width, CHANNELS=min(width, tuned.columns),
        CHUNK=size, LEVELS=size.bit_length() - 1,
        PRECISION=product_precision(k.dtype), EXACT=exact(),
        num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
    return result


def chunking(k: torch.Tensor) -> Configuration:
    """The configuration of chunks: `rows` tokens, `columns` channels at a time."""
    return configured("path_chunks", k, k)
