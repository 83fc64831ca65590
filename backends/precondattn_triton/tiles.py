"""Tiles: a block of tokens of one head by all of its channels.

Kernels read tensors (b, tokens, heads, channels) with any strides, without a copy. Widths are
padded with zeros to powers of two. A token outside the sequence, or an invalid one, is read as
zeros, whatever its memory contains. Indices are multiplied by strides in 64 bits: a tensor may have
more than 2³¹ elements.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from precondattn.frame import Frame
from precondattn.kernel_backend.limits import padded_width
from precondattn_triton.configurations import Configuration, configuration

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_of_program(tiles, heads):
    """This program's tile, batch and head, in a grid of tiles × heads × batches.

    The last tiles come first: in a causal call they have the most work.
    """
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles
    head = program // tiles
    return tile, (head // heads).to(tl.int64), (head % heads).to(tl.int64)


@triton.jit
def is_token(valid, batch, tokens, count):
    """Whether a token exists and is valid; `valid` is (b, count), or None if all are valid."""
    is_present = tokens < count
    if valid is not None:
        is_present = is_present & (
            tl.load(valid + batch * count + tokens, mask=is_present, other=0) != 0
        )
    return is_present


@triton.jit
def addresses(start, tokens, token_stride, channels, channel_stride):
    """Addresses (tokens, channels) of a head that begins at `start`."""
    rows = tokens.to(tl.int64)[:, None] * token_stride
    return start + rows + channels.to(tl.int64)[None, :] * channel_stride


@triton.jit
def load_tile(
    start, tokens, is_present, token_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr, first=0
):  # fmt: skip
    """PADDED channels of tokens from channel `first` on, of a head with contiguous channels; 0 for
    tokens that are not present and from channel WIDTH on."""
    channels = first + tl.arange(0, PADDED)
    at = addresses(start, tokens, token_stride, channels, 1)
    return tl.load(at, mask=is_present[:, None] & (channels < WIDTH)[None, :], other=0.0)


class Heads(NamedTuple):
    """An array (b, tokens, heads, channels) and its strides, as an argument of a kernel."""

    array: torch.Tensor
    batch: int
    token: int
    head: int
    channel: int


def heads(array: torch.Tensor) -> Heads:
    """The argument of a kernel that reads heads of the array."""
    return Heads(array, *array.stride())


class CallSizes(NamedTuple):
    """The sizes of a call, as an argument of a kernel."""

    scale: float
    t: int
    s: int
    h: int
    n: int


@triton.jit
def start_of(x, batch, head):
    """The first element of a head of `Heads`."""
    return x.array + batch * x.batch + head * x.head


@triton.jit
def load_channels(
    x, start, tokens, is_present,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, first=0, IS_WHOLE: tl.constexpr = False,
):  # fmt: skip
    """PADDED channels of tokens from channel `first` on, of the head of `Heads` at `start`; 0 for
    tokens that are not present, and from channel WIDTH on. All tokens of a whole tile are."""
    channels = first + tl.arange(0, PADDED)
    at = addresses(start, tokens, x.token, channels, x.channel)
    if IS_WHOLE:
        if WIDTH == PADDED:
            return tl.load(at)
        return tl.load(at, mask=(channels < WIDTH)[None, :], other=0.0)
    return tl.load(at, mask=is_present[:, None] & (channels < WIDTH)[None, :], other=0.0)


@triton.jit
def store_channels(start, tokens, is_present, token_stride, tile, WIDTH: tl.constexpr, first=0):
    """Store a tile as the channels from `first` on, contiguously, in the dtype of the array."""
    channels = first + tl.arange(0, tile.shape[1])
    at = addresses(start, tokens, token_stride, channels, 1)
    mask = is_present[:, None] & (channels < WIDTH)[None, :]
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
    """A block of tokens and channels of one head of a user's array; 0 outside the array."""
    token = start + tl.arange(0, ROWS).to(tl.int64)
    channel = first + tl.arange(0, WIDTH).to(tl.int64)
    is_present = (token >= 0) & (token < count)
    inside = is_present[:, None] & (channel < width)[None, :]
    at = token[:, None] * token_stride + channel[None, :] * channel_stride
    return tl.load(array + at, mask=inside, other=0.0)


@triton.jit
def load_rows(array, head, tokens, start, ROWS: tl.constexpr, WIDTH: tl.constexpr, first, STEP):
    """Columns `first` … of rows `start` … of the workspace (m, T, STEP), as (ROWS, WIDTH)."""
    rows = (head * tokens + start).to(tl.int64) + tl.arange(0, ROWS)
    return tl.load(array + rows[:, None] * STEP + first + tl.arange(0, WIDTH)[None, :])


class KernelMasks(NamedTuple):
    """Validity and segments of a frame, as kernels read them; None where nothing is masked."""

    q_valid: torch.Tensor | None
    """(b, t), bytes"""
    k_valid: torch.Tensor | None
    """(b, s), bytes"""
    segment: torch.Tensor | None
    """(b, 2, s), 32 bits: the first token of the segment of each token, and the last one plus 1"""


def masks_of(frame: Frame, b: int) -> KernelMasks:
    """The masks of a full call, whose queries have the positions of the last keys."""
    segment = None if frame.k_segment is None else segments_of(frame.k_segment)
    return KernelMasks(bytes_of(frame.q_valid, b), bytes_of(frame.k_valid, b), segment)


def bytes_of(valid: torch.Tensor | None, b: int) -> torch.Tensor | None:
    """The validity of the tokens of b sequences, as bytes."""
    return None if valid is None else valid.expand(b, -1).contiguous().view(torch.uint8)


def segments_of(ids: torch.Tensor) -> torch.Tensor:
    """The first and the end token of each token's segment (b, 2, s), from segment ids (b, s).

    Equal ids are adjacent. A segment is identified by its first token.
    """
    is_new = (ids[:, 1:] != ids[:, :-1]).to(torch.int32)
    run = torch.nn.functional.pad(is_new, (1, 0)).cumsum(1, dtype=torch.int32)
    begin, end = (
        torch.searchsorted(run, run, right=right, out_int32=True) for right in (False, True)
    )
    return torch.stack((begin, end), 1)


def factor_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of exponentials in products: float16 does not have their range."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def configured(kernel: str, q: torch.Tensor, v: torch.Tensor) -> Configuration:
    """A kernel's configuration for inputs like these, on their device."""
    width = max(padded_width(q.shape[3]), padded_width(v.shape[3]))
    return configuration(kernel, width, factor_dtype(v.dtype) == torch.bfloat16, v)
