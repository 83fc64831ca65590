"""Tiles of LUCID's matrix, and the layout of the workspace of a solve.

    Φ_ij = e^{s ⟨k̂_i, k̂_j⟩ − s d} ≤ 1,    0 if i and j belong to different segments

Arrays of the workspace are contiguous and padded: (m, T, w), with m = b n the heads of all
sequences, T the tokens padded to whole blocks and w a power of two. Invalid tokens and padding have
k̂ = 0, v = 0 and β = 0, so that kernels need no mask.

`segments` (b, 2, T) are the first token of each token's segment, by which it is identified, and the
last plus one; padding is a segment of its own. Tiles without a common segment are not multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.tiles import load_rows

PART = tl.constexpr(32)
"""Channels of keys in one product of `scores_in_parts`."""


@triton.jit
def column_of(start, TILE: tl.constexpr, SUPER: tl.constexpr):
    """The column of a tile in its super-block; the compiler cannot infer that TILE divides it."""
    return tl.multiple_of(start % SUPER, TILE)


@triton.jit
def highest_difference(i, j):
    """The highest bit in which two unequal numbers differ, below 2²³."""
    # The 0.5 keeps the logarithm away from integers, so that its rounding does not matter.
    return tl.floor(tl.log2((i ^ j).to(tl.float32) + 0.5)).to(tl.int64)


@triton.jit
def reach(segments, tokens, start, COUNT: tl.constexpr):
    """Tokens that share a segment with any of COUNT tokens: the first, and the last plus one."""
    return tl.load(segments + start), tl.load(segments + tokens + start + COUNT - 1)


@triton.jit
def weights(scores, segments, i_start, j_start, scale, shift):
    """Φ of a tile, from ⟨k̂_i, k̂_j⟩; scale and shift are s and s d, times log₂ e."""
    exponents = scores * scale - shift
    if segments is not None:
        i_segments = tl.load(segments + i_start + tl.arange(0, scores.shape[0]))
        j_segments = tl.load(segments + j_start + tl.arange(0, scores.shape[1]))
        # A select after the exponential would be of 16 bits, and take twice the registers.
        same = i_segments[:, None] == j_segments[None, :]
        exponents = tl.where(same, exponents, -float("inf"))
    return tl.exp2(exponents)


@triton.jit
def phi(i_keys, j_keys, segments, i_start, j_start, scale, shift, PRECISION: tl.constexpr):
    """Φ of two tiles of keys (I, d) and (J, d)."""
    scores = tl.dot(i_keys, tl.trans(j_keys), input_precision=PRECISION)
    return weights(scores, segments, i_start, j_start, scale, shift)


@triton.jit
def scores_in_parts(
    keys, head, tokens, i_start, j_start, TILE: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """⟨k̂_i, k̂_j⟩ of two tiles of keys, a part of their channels at a time.

    For small tiles of wide keys, whose rows would not fit in registers.
    """
    scores = tl.zeros((TILE, TILE), tl.float32)
    CHANNELS: tl.constexpr = PART if WIDTH > PART else WIDTH
    for first in tl.static_range(0, WIDTH, CHANNELS):
        i_keys = load_rows(keys, head, tokens, i_start, TILE, CHANNELS, first, WIDTH)
        j_keys = load_rows(keys, head, tokens, j_start, TILE, CHANNELS, first, WIDTH)
        scores += tl.dot(i_keys, tl.trans(j_keys), input_precision=PRECISION)
    return scores
