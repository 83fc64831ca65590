"""Tiles of a part of the channels, so that a tile, or the sum of a product, fits the registers.

Differential attention computes values wider than 256 in parts. A part of o or dv is the weights
times a part of v or do, and needs all scores again. The product do vᵀ is a sum over parts, in one
program. LASER divides the channels of wide heads (`laser_wide.py`) and of exact heads
(`laser_exact.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn.kernel_backend.limits import padded_width
from precondattn_triton.tiles import addresses

WIDEST_PART = 256


def part_width(e: int, widest: int = WIDEST_PART) -> int:
    """Channels of a part, a power of 2; all of them up to `widest`."""
    return min(padded_width(e), widest)


@triton.jit
def load_part(
    start, tokens, is_present, token_stride, channel_stride, first,
    WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """PADDED channels from `first` on, of a tile; 0 for tokens that are not present, and from
    channel WIDTH on."""
    channels = first + tl.arange(0, PADDED)
    at = addresses(start, tokens, token_stride, channels, channel_stride)
    return tl.load(at, mask=is_present[:, None] & (channels < WIDTH)[None, :], other=0.0)


@triton.jit
def store_part(start, tokens, is_present, token_stride, first, tile, WIDTH: tl.constexpr):
    """Store a tile as the channels from `first` on, contiguously, in the dtype of the array."""
    channels = first + tl.arange(0, tile.shape[1])
    at = addresses(start, tokens, token_stride, channels, 1)
    mask = is_present[:, None] & (channels < WIDTH)[None, :]
    tl.store(at, tile.to(start.dtype.element_ty), mask=mask)
