"""PaTH's chunks backward: gradients of k, w and β from the gradients of the chunks' results.

With the factors of `chunks.py`, and F the gradient of P,

    K̃ = k − (Z R)ᵀ w:         dk += dK̃,    dw −= Z R dK̃,    d(Z R) −= w dK̃ᵀ
    P = I − wᵀ U:              dU −= w F,    dw −= U Fᵀ
    Z R and U = Z w:           dZ = d(Z R) Rᵀ + dU wᵀ,    dR = stril(Zᵀ d(Z R)),    dw += Zᵀ dU
    R = stril(w kᵀ):           dk += dRᵀ w,    dw += dR k
    Z = M diag(β):             dM = dZ diag(β),    dβ_j = Σ_i M_ij dZ_ij
    M = (I + diag(β) G)⁻¹:     dX = −Mᵀ dM Mᵀ,    dβ_i += Σ_j dX_ij G_ij
    G = stril(w wᵀ):           dG = stril(diag(β) dX),    dw += (dG + dGᵀ) w

If its block has queries after it (`blocks.py`: A, and Γ the gradient of A P), they add

    dK̃ += dK̂ A,    dU −= (w Aᵀ) Γ,    dw −= (U Γᵀ) A.

Grid: one program per chunk and key/value head. It passes over the channels twice, in parts, and for
each part over all channels where matrices D × D are a factor: 2 C d² products for F, 3 C d² for A
and Γ, and 8 C² d + 6 C³ for the rest. Registers hold matrices C × C, and parts of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from precondattn_triton.configurations import configuration
from precondattn_triton.launching import launch
from precondattn_triton.path.chunks import PathChunks, rows_of
from precondattn_triton.precision import product_precision
from precondattn_triton.tiles import (
    KernelMasks,
    heads,
    is_token,
    load_channels,
    start_of,
    tile_of_program,
)


class ChunkGradients(NamedTuple):
    """The gradients of the chunks' results, from all queries; float32."""

    k: Tensor
    w: Tensor
    u: Tensor
    zr: Tensor
    keys: Tensor
    """dK̃"""
    correction: Tensor
    """F (b n chunks, D, D)"""


class BlockGradients(NamedTuple):
    """What the chunks of all blocks but the last one need in addition."""

    after: Tensor
    """A − I (b n, chunks, D, D), in factor dtype, as are Γ and the rows of w and U"""
    matrices: Tensor
    """Γ (b n, chunks, D, D)"""
    w: Tensor
    """w Aᵀ (b n, chunks C, D)"""
    u: Tensor
    """U Γᵀ (b n, chunks C, D)"""
    keys: Tensor
    """dK̂ (b n, chunks C, D), float32"""


@triton.jit
def _tile(array, rows, columns, is_present, STEP: tl.constexpr):
    """Load a tile of rows of (…, STEP); 0 where `is_present` is false."""
    at = array + rows[:, None] * STEP + columns[None, :]
    return tl.load(at, mask=is_present, other=0.0)


@triton.jit
def _chunk_gradient(
    k, beta, w, u, zr, inverse, k_valid,
    d_k_in, d_w_in, d_u_in, d_zr_in, d_keys_in, matrices,
    after, d_after, w_after, u_after, d_block_keys, d_k, d_w, d_beta,
    s, n, chunks, kept,
    D: tl.constexpr, PADDED_D: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, batch, head = tile_of_program(chunks, n)
    index, count = batch * n + head, chunks * CHUNK
    start = chunk * CHUNK
    rows = tl.arange(0, CHUNK)
    tokens = start + rows
    # One tile of addresses serves all arrays.
    base = (index * count + start) * PADDED_D
    w, u, d_k, d_w = w + base, u + base, d_k + base, d_w + base
    d_k_in, d_w_in, d_u_in = d_k_in + base, d_w_in + base, d_u_in + base
    d_keys_in += base
    d_beta += index * count + start
    is_present = is_token(k_valid, batch, tokens, s)
    at = start_of(beta, batch, head) + tokens.to(tl.int64) * beta.token
    strength = tl.load(at, mask=is_present, other=0.0).to(tl.float32)
    k_start = start_of(k, batch, head)
    matrices += (index * chunks + chunk) * PADDED_D * PADDED_D
    if after is not None:
        # A chunk of the last block has no A: A − I and all gradients are 0.
        is_kept = chunk < kept
        at_chunk = tl.where(is_kept, index * kept + chunk, 0)
        after += at_chunk * PADDED_D * PADDED_D
        d_after += at_chunk * PADDED_D * PADDED_D
        base = at_chunk * CHUNK * PADDED_D
        w_after, u_after, d_block_keys = w_after + base, u_after + base, d_block_keys + base

    overlap = tl.zeros((CHUNK, CHUNK), tl.float32)
    right = tl.zeros((CHUNK, CHUNK), tl.float32)
    d_z = tl.zeros((CHUNK, CHUNK), tl.float32)
    d_zr = rows_of(d_zr_in, index, count, start, CHUNK, CHUNK)
    for first in range(0, PADDED_D, PART):
        part = first + tl.arange(0, PART)
        d_key = _tile(d_keys_in, rows, part, True, PADDED_D)
        d_u = _tile(d_u_in, rows, part, True, PADDED_D)
        if after is not None:
            d_key += _tile(d_block_keys, rows, part, is_kept, PADDED_D)
        for second in range(0, PADDED_D, PART):
            other = second + tl.arange(0, PART)
            left = _tile(w, rows, other, True, PADDED_D).to(tl.float32)
            matrix = _tile(matrices, other, part, True, PADDED_D)
            d_u -= tl.dot(left, matrix, input_precision=PRECISION)
            if after is not None:
                left = _tile(w_after, rows, other, is_kept, PADDED_D)
                matrix = _tile(d_after, other, part, is_kept, PADDED_D)
                d_u -= tl.dot(left, matrix, input_precision=PRECISION)
                matrix = _tile(after, other, part, is_kept, PADDED_D)
                left = _tile(d_block_keys, rows, other, is_kept, PADDED_D).to(matrix.dtype)
                d_key = tl.dot(left, matrix, d_key, input_precision=PRECISION)
        k_part = load_channels(k, k_start, tokens, is_present, D, PART, first)
        w_part = _tile(w, rows, part, True, PADDED_D).to(tl.float32)
        overlap = tl.dot(w_part, tl.trans(w_part), overlap, input_precision=PRECISION)
        k_part = k_part.to(tl.float32)
        right = tl.dot(w_part, tl.trans(k_part), right, input_precision=PRECISION)
        d_z = tl.dot(d_u, tl.trans(w_part), d_z, input_precision=PRECISION)
        d_zr -= tl.dot(w_part, tl.trans(d_key), input_precision=PRECISION)
        at_out = rows[:, None] * PADDED_D + part[None, :]
        tl.store(d_k + at_out, d_key)
        tl.store(d_w + at_out, d_u)

    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    m = rows_of(inverse, index, count, start, CHUNK, CHUNK)
    z = m * strength[None, :]
    right = tl.where(j < i, right, 0.0)
    d_z = tl.dot(d_zr, tl.trans(right), d_z, input_precision=PRECISION)
    d_right = tl.where(j < i, tl.dot(tl.trans(z), d_zr, input_precision=PRECISION), 0.0)
    d_system = tl.dot(tl.trans(m), d_z * strength[None, :], input_precision=PRECISION)
    d_system = -tl.dot(d_system, tl.trans(m), input_precision=PRECISION)
    overlap = tl.where(j < i, overlap, 0.0)
    tl.store(d_beta + rows, tl.sum(m * d_z, 0))
    d_overlap = tl.where(j < i, strength[:, None] * d_system, 0.0)
    d_overlap += tl.trans(d_overlap)
    tl.debug_barrier()
    of_system = tl.sum(d_system * overlap, 1)
    tl.store(d_beta + rows, of_system + tl.load(d_beta + rows))

    zr_tile = rows_of(zr, index, count, start, CHUNK, CHUNK).to(tl.float32)
    for first in range(0, PADDED_D, PART):
        part = first + tl.arange(0, PART)
        d_key = _tile(d_k, rows, part, True, PADDED_D)
        d_u = _tile(d_w, rows, part, True, PADDED_D)
        w_part = _tile(w, rows, part, True, PADDED_D).to(tl.float32)
        at_out = rows[:, None] * PADDED_D + part[None, :]
        gradient = _tile(d_k_in, rows, part, True, PADDED_D) + d_key
        gradient = tl.dot(tl.trans(d_right), w_part, gradient, input_precision=PRECISION)
        tl.store(d_k + at_out, gradient)
        gradient = _tile(d_w_in, rows, part, True, PADDED_D)
        gradient -= tl.dot(zr_tile, d_key, input_precision=PRECISION)
        gradient = tl.dot(tl.trans(z), d_u, gradient, input_precision=PRECISION)
        gradient = tl.dot(d_overlap, w_part, gradient, input_precision=PRECISION)
        k_part = load_channels(k, k_start, tokens, is_present, D, PART, first)
        gradient = tl.dot(d_right, k_part.to(tl.float32), gradient, input_precision=PRECISION)
        if after is not None:
            gradient -= _tile(u_after, rows, part, is_kept, PADDED_D).to(tl.float32)
        for second in range(0, PADDED_D, PART):
            other = second + tl.arange(0, PART)
            left = _tile(u, rows, other, True, PADDED_D).to(tl.float32)
            matrix = _tile(matrices, part, other, True, PADDED_D)
            gradient -= tl.dot(left, tl.trans(matrix), input_precision=PRECISION)
            if after is not None:
                left = _tile(u_after, rows, other, is_kept, PADDED_D)
                matrix = _tile(after, other, part, is_kept, PADDED_D)
                gradient -= tl.dot(left, matrix, input_precision=PRECISION)
        tl.store(d_w + at_out, gradient)


def through_chunks(
    k: Tensor,
    beta: Tensor,
    chunks: PathChunks,
    masks: KernelMasks,
    d_chunks: ChunkGradients,
    d_blocks: BlockGradients | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dk and dw (b n, T, D), dβ (b n, T), float32, of k (b, s, n, d) and β (b, s, n)."""
    _, s, n, d = k.shape
    w, _, u, zr, inverse = chunks
    d_k, d_w = torch.empty_like(d_chunks.k), torch.empty_like(d_chunks.k)
    d_beta = d_k.new_empty(d_k.shape[:2])
    width = w.shape[2]
    tuned = configuration("path_chunk_gradient", width, w.dtype == torch.bfloat16, w)
    kept = 0 if d_blocks is None else d_blocks.after.shape[1]
    launch(
        _chunk_gradient, (chunks.number * w.shape[0],),
        heads(k), heads(beta[..., None]), w, u, zr, inverse, masks.k_valid,
        *d_chunks, *(d_blocks or (None,) * 5), d_k, d_w, d_beta,
        s, n, chunks.number, kept,
        D=d, PADDED_D=width, PART=min(width, tuned.columns), CHUNK=chunks.size,
        PRECISION=product_precision(k.dtype),
        num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
    return d_k, d_w, d_beta


def tokens_of(rows: Tensor, like: Tensor) -> Tensor:
    """Rows in the layout of chunks (b n, T, …) as an array (b, s, n, …) like an input."""
    b, s, n = like.shape[:3]
    each = rows.unflatten(0, (b, n))[:, :, :s].transpose(1, 2)
    return (each[..., : like.shape[3]] if like.ndim == 4 else each).to(like.dtype)
