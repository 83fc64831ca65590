"""Rows of a step: the queries of a key/value head, for all of its new tokens, and cached tokens.

A step reads a cache of keys and values, which many programs share: each program reads some of the
cached tokens, for all rows of a key/value head at once, so that every key and value is read once.
Another kernel merges their results, and adds the new tokens. Row i is the query of new token
⌊i / group⌋ and of query head i mod `group` of the key/value head. With `length` cached tokens, the
new token j is at position `length` + j; it reads the cached tokens that are valid and in its
window, and the new tokens up to its own: only causal attention has a cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from precondattn_triton.softmax.score_options import scores_and_slopes
from precondattn_triton.tiles import LOG2_E, start_of


@triton.jit
def query_tile(q, head, heads, group, t, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The queries (d) of a head as rows of a tile, in float32; other rows are 0."""
    row, channel = tl.arange(0, ROWS), tl.arange(0, WIDTH).to(tl.int64)
    is_row = row < group * t
    row = tl.where(is_row, row, 0)
    of_head = (head % heads * group + row % group) * q.head
    at = q.array + head // heads * q.batch + (row // group).to(tl.int64) * q.token + of_head
    inside = is_row[:, None] & (channel < width)[None, :]
    return tl.load(at[:, None] + channel[None, :] * q.channel, mask=inside, other=0.0).to(
        tl.float32
    )


@triton.jit
def cached_length(lengths, count, b):
    """The number of cached tokens of sequence b."""
    length = count
    if lengths is not None:
        length = tl.load(lengths + b).to(tl.int32)
    return length


@triton.jit
def cached_tokens(lengths, split, per_split, count, b, window, TOKENS: tl.constexpr):
    """The number of cached tokens of sequence b, and the first and the last + 1 of a program's."""
    length = cached_length(lengths, count, b)
    begin = split * per_split
    if window is not None:
        begin = tl.maximum(begin, (length + 1 - window) // TOKENS * TOKENS)
    return length, begin, tl.minimum((split + 1) * per_split, length)


@triton.jit
def valid_slots(valid, b, valid_b, slot, end, oldest):
    """Whether cached tokens may be read by a row."""
    is_read = (slot < end) & (slot >= oldest)
    if valid is not None:
        is_read = is_read & (tl.load(valid + b * valid_b + slot, mask=is_read, other=0) != 0)
    return is_read


@triton.jit
def slots_of(x, start, slot, is_read, width, WIDTH: tl.constexpr):
    """A tile (slots, channels) of a head's cached keys or values, in float32; 0 if not read."""
    channel = tl.arange(0, WIDTH).to(tl.int64)
    at = start + slot.to(tl.int64)[:, None] * x.token + channel[None, :] * x.channel
    inside = is_read[:, None] & (channel < width)[None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def masked(scores, is_read, slot, row_position, window):
    """S (ROWS, slots), −∞ where a row may not read a slot."""
    is_visible = is_read[None, :]
    if window is not None:
        is_visible = is_visible & (row_position[:, None] - slot[None, :] < window)
    return tl.where(is_visible, scores, float("-inf"))


@triton.jit
def sees_new(is_valid, token, row_token, window):
    """Whether rows may read one new token."""
    is_visible = (row_token >= token) & is_valid
    if window is not None:
        is_visible = is_visible & (row_token - token < window)
    return is_visible


@triton.jit
def step_scores(products, row_token, position, is_pair, b, head, length, scale, scoring):
    """S in units of log 2 from ⟨q, k⟩ of rows and of tokens at a position, which is a column of a
    bias; `scale` is in these units. Rows, positions and heads broadcast to the products."""
    if (scoring.softcap is None and scoring.bias is None) and scoring.slopes is None:
        scores = products * scale
    else:
        # The new token i is at position i + length.
        scores, _slope = scores_and_slopes(
            products,
            row_token,
            position,
            is_pair,
            b,
            head,
            0,
            length,
            scale / LOG2_E,
            scoring,
            True,
        )
    return scores


@triton.jit
def channels_of(x, batch, token, head, width, is_read, WIDTH: tl.constexpr):
    """The channels of one token of `Heads`, in float32; 0 if it is not read."""
    channel = tl.arange(0, WIDTH)
    mask = (channel < width) & is_read
    at = start_of(x, batch, head) + token * x.token + channel.to(tl.int64) * x.channel
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def finite(largest):
    """A maximum, or 0 where it is −∞ because there is nothing yet."""
    return tl.where(largest == float("-inf"), 0.0, largest)
