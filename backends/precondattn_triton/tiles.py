"""Tiles: some tokens of one head by all of its channels.

Kernels read tensors (b, tokens, heads, channels) of any strides where they lie. Widths are padded
with zeros to powers of two; a token that is not there, or is not valid, reads as zeros, whatever
stands in its place. Indices are multiplied by strides in 64 bits: a tensor may have more than 2³¹
elements.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from precondattn.frame import Frame
from precondattn_triton.configurations import Configuration, configuration
from precondattn_triton.precision import padded_width

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def place(tiles, heads):
    """This program's tile, batch and head, of a grid of tiles × heads × batches.

    Late tiles first: in a causal call they have the most to do.
    """
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles
    head = program // tiles
    return tile, (head // heads).to(tl.int64), (head % heads).to(tl.int64)


@triton.jit
def is_token(valid, batch, tokens, count):
    """Whether there is such a token, and it counts; `valid` (b, count), or None where all do."""
    found = tokens < count
    if valid is not None:
        found = found & (tl.load(valid + batch * count + tokens, mask=found, other=0) != 0)
    return found


@triton.jit
def visible(row, column, is_key, batch, t, s, q_segment, k_segment, CAUSAL: tl.constexpr):
    """May query `row` of t look at key `column` of s? Of shapes that broadcast, as the answer."""
    seen = is_key
    if CAUSAL:
        seen = seen & (column <= row + (s - t))
    if q_segment is not None:
        own = tl.load(q_segment + batch * t + row, mask=row < t, other=0)
        other = tl.load(k_segment + batch * s + column, mask=column < s, other=0)
        seen = seen & (own == other)
    return seen


@triton.jit
def addresses(start, tokens, token_stride, channels, channel_stride):
    """(tokens, channels) of a head that begins at `start`."""
    rows = tokens.to(tl.int64)[:, None] * token_stride
    return start + rows + channels.to(tl.int64)[None, :] * channel_stride


@triton.jit
def load_tile(
    start,
    tokens,
    is_there,
    token_stride,
    channel_stride,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """(tokens, PADDED); 0 where a token is not there, and in channels from WIDTH on."""
    channels = tl.arange(0, PADDED)
    at = addresses(start, tokens, token_stride, channels, channel_stride)
    return tl.load(at, mask=is_there[:, None] & (channels < WIDTH)[None, :], other=0.0)


@triton.jit
def store_tile(start, tokens, is_there, token_stride, tile, WIDTH: tl.constexpr):
    """The first WIDTH channels of a tile, which stand together, in the dtype that is there."""
    channels = tl.arange(0, tile.shape[1])
    at = addresses(start, tokens, token_stride, channels, 1)
    mask = is_there[:, None] & (channels < WIDTH)[None, :]
    tl.store(at, tile.to(start.dtype.element_ty), mask=mask)


@triton.jit
def load_tokens(
    array,
    start,
    first,
    count,
    width,
    token_stride,
    channel_stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Some tokens and channels of one head of a user's array, 0 beyond its ends, on both sides."""
    token = start + tl.arange(0, ROWS).to(tl.int64)
    channel = first + tl.arange(0, WIDTH).to(tl.int64)
    there = (token >= 0) & (token < count)
    inside = there[:, None] & (channel < width)[None, :]
    at = token[:, None] * token_stride + channel[None, :] * channel_stride
    return tl.load(array + at, mask=inside, other=0.0)


@triton.jit
def load_rows(array, head, tokens, start, ROWS: tl.constexpr, WIDTH: tl.constexpr, first, STEP):
    """Columns `first` … of rows `start` … of scratch (m, T, STEP), as (ROWS, WIDTH)."""
    rows = (head * tokens + start).to(tl.int64) + tl.arange(0, ROWS)
    return tl.load(array + rows[:, None] * STEP + first + tl.arange(0, WIDTH)[None, :])


class Masks(NamedTuple):
    """What a frame hides, as kernels read it; None where nothing is hidden so."""

    q_valid: torch.Tensor | None
    """(b, t), of bytes"""
    k_valid: torch.Tensor | None
    """(b, s), of bytes"""
    q_segment: torch.Tensor | None
    """(b, t), which run of equal ids a query belongs to, of 32 bits"""
    k_segment: torch.Tensor | None
    """(b, s), of 32 bits"""


def masks_of(frame: Frame, b: int, t: int) -> Masks:
    """For a full call of t queries, whose positions are those of the last t keys."""

    def bytes_of(valid: torch.Tensor | None) -> torch.Tensor | None:
        return None if valid is None else valid.expand(b, -1).contiguous().view(torch.uint8)

    q_segment, k_segment = None, frame.k_segment
    if k_segment is not None:
        # Numbers of runs, since the ids themselves may have 64 bits; equal ids stand together.
        is_new = (k_segment[:, 1:] != k_segment[:, :-1]).to(torch.int32)
        k_segment = torch.nn.functional.pad(is_new, (1, 0)).cumsum(1, dtype=torch.int32)
        q_segment = k_segment[:, k_segment.shape[1] - t :].contiguous()
    return Masks(bytes_of(frame.q_valid), bytes_of(frame.k_valid), q_segment, k_segment)


def factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of exponentials in products, for inputs of this dtype: float16 has not the range."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def configured(kernel: str, q: torch.Tensor, v: torch.Tensor) -> Configuration:
    """A kernel's configuration for inputs like these, on their device."""
    width = max(padded_width(q.shape[3]), padded_width(v.shape[3]))
    return configuration(kernel, width, factor_dtype(v.dtype) == torch.bfloat16, v)
