"""The tokens of every sequence in reversed order, and the masks of such a call.

    y_i = x_{a + z − i},    a ≤ i ≤ z,

where a and z are the first and the last token of the packed segment of token i, or of its sequence.
Padding stays where it is, after the tokens: each of its tokens is a segment of its own. Reversed
twice, tokens have their order again.
"""

from __future__ import annotations

from precondattn.arrays import (
    Array,
    arange_like,
    as_index,
    differs_from_previous,
    fresh,
    namespace,
    take_tokens,
)
from precondattn.frame import Frame
from precondattn.native.scan import running_maximum


def reversed_tokens(x: Array, frame: Frame) -> Array:
    """x (b, t, …), reversed within each segment."""
    if frame.q_valid is None and frame.q_segment is None:
        return fresh(namespace(x).flip(x, axis=1))  # NumPy's is a view.
    return take_tokens(x, as_index(_facing(frame)))


def reversed_keys(frame: Frame) -> Frame:
    """The frame of reversed tokens: a key that `key_mask` masks is masked at its new place.

    Lengths and segments are those of before, as padding and segments stay where they are.
    """
    if frame.k_valid is None or frame.layout.has_lengths_only:
        return frame
    return frame.with_valid_keys(reversed_tokens(frame.k_valid, frame))


def _facing(frame: Frame) -> Array:
    """The token (b, t) whose place each token takes."""
    valid, segment = frame.q_valid, frame.q_segment
    mask = segment if valid is None else valid
    assert mask is not None
    xp, tokens = namespace(mask), arange_like(mask.shape[1], mask)
    last = mask.shape[1] - 1
    is_first = tokens == 0
    if segment is not None:
        is_first = is_first | differs_from_previous(segment)
    if valid is not None:  # The first token of padding, and all after it, are parted.
        is_first = is_first | ~valid
    following = as_index(xp.where(tokens < last, tokens + 1, tokens))
    is_last = (tokens == last) | xp.take(is_first, following, axis=1)
    first = running_maximum(xp.where(is_first, tokens, 0), axis=1)
    # The last token of a segment is the first of it from the other side.
    before_last = running_maximum(xp.flip(xp.where(is_last, xp.flip(tokens), 0), axis=1), axis=1)
    return first + xp.flip(last - before_last, axis=1) - tokens
