"""Reversing the tokens of every sequence, and the frame of the reversed tokens.

    y_i = x_{a + z − i},    a ≤ i ≤ z,

where a and z are the first and the last token of token i's packed segment, or of its sequence if it
is not packed. Padding stays in place, after the tokens: each of its tokens is treated as a segment.
Reversing twice restores the order.
"""

from __future__ import annotations

from precondattn.arrays import (
    Array,
    arange_like,
    as_index,
    differs_from_previous,
    fresh,
    namespace,
    running_maximum,
    take_tokens,
)
from precondattn.frame import Frame


def reversed_tokens(x: Array, frame: Frame) -> Array:
    """x (b, t, …), reversed within each segment."""
    if frame.q_valid is None and frame.q_segment is None:
        return fresh(namespace(x).flip(x, axis=1))  # NumPy's flip is a view.
    return take_tokens(x, as_index(_facing(frame)))


def reversed_keys(frame: Frame) -> Frame:
    """The frame of the reversed tokens; a key that `key_mask` masks is masked at its new place."""
    if frame.k_valid is None or frame.layout.has_lengths_only:
        return frame
    return frame.changed(frame.layout, k_valid=reversed_tokens(frame.k_valid, frame))


def _facing(frame: Frame) -> Array:
    """The index (b, t) of the token whose place each token takes."""
    valid, segment = frame.q_valid, frame.q_segment
    mask = segment if valid is None else valid
    assert mask is not None
    xp, tokens = namespace(mask), arange_like(mask.shape[1], mask)[None, :]
    last = mask.shape[1] - 1
    is_first = tokens == 0
    if segment is not None:
        is_first = is_first | differs_from_previous(segment)
    if valid is not None:  # Each token of padding is a segment.
        is_first = is_first | ~valid
    following = as_index(xp.where(tokens < last, tokens + 1, tokens)[0, :])
    is_last = (tokens == last) | xp.take(is_first, following, axis=1)
    first = running_maximum(xp.where(is_first, tokens, 0), axis=1)
    # The last token of a segment is its first in reversed order.
    before_last = running_maximum(xp.flip(xp.where(is_last, xp.flip(tokens), 0), axis=1), axis=1)
    return first + xp.flip(last - before_last, axis=1) - tokens
