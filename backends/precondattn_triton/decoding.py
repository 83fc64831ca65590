"""Functions that the decoding kernels share: steps by one token with a cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from precondattn.frame import Frame
from precondattn_triton.launching import cdiv
from precondattn_triton.target import processors

PROGRAMS_PER_PROCESSOR = 2
"""Programs per multiprocessor that read the cache: enough to hide the latency of memory."""


@triton.jit
def query_rows(
    q, head, heads, group, width, q_b, q_h, q_d, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """The queries of a group of heads (ROWS, d); the remaining rows are 0."""
    row, channel = tl.arange(0, ROWS), tl.arange(0, WIDTH).to(tl.int64)
    at = q + head // heads * q_b + (head % heads * group + row[:, None]) * q_h
    inside = (row < group)[:, None] & (channel < width)[None, :]
    return tl.load(at + channel[None, :] * q_d, mask=inside, other=0.0).to(tl.float32)


def slots_and_validity(
    frame: Frame, capacity: int, t: int = 1
) -> tuple[int, Tensor | None, Tensor | None]:
    """The number of slots to read, and the validity of slots and of t new keys, bytes or None."""
    if frame.held is not None:
        return frame.held, None, None
    valid = frame.k_valid
    assert valid is not None  # The frame of an extension always has the validity of slots.
    valid = valid.expand(frame.q_position.shape[0], capacity + t).to(torch.uint8)
    return capacity, valid[:, :capacity], valid[:, capacity:]


def new_token_validity(frame: Frame, b: int) -> Tensor | None:
    """The validity of new tokens, as bytes or None. The key of a valid token may be masked."""
    return None if frame.q_valid is None else frame.q_valid.expand(b, -1).to(torch.uint8)


def splits_of(like: Tensor, count: int, heads: int, tile: int) -> tuple[int, int]:
    """The number of programs that share a head's tokens, and the tokens of each, in whole tiles."""
    tiles = max(cdiv(count, tile), 1)
    wanted = max(PROGRAMS_PER_PROCESSOR * processors(like) // heads, 1)
    per_split = cdiv(tiles, min(wanted, tiles)) * tile
    return max(cdiv(count, per_split), 1), per_split
