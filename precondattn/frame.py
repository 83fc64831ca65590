"""Who may look at whom, besides what a mechanism itself says.

One frame serves full calls and `extend`. In a full call of t queries and s keys, query i stands at
position i + s − t (bottom-right alignment). In `extend` the keys are the cache's slots followed by
the new tokens, and the new tokens stand at the positions after their own sequence's length.
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn.arrays import Array, arange_like, is_traced, namespace


class Frame(NamedTuple):
    """Positions, validity and segments of queries (b, t) and keys (b, s).

    The batch axis of positions is 1 where all sequences share them. Validity and segments are None
    where the call has none, so that a backend sees without looking at values that nothing is
    masked.
    """

    q_position: Array
    k_position: Array
    q_valid: Array | None = None
    k_valid: Array | None = None
    q_segment: Array | None = None
    k_segment: Array | None = None

    def visible(self, *, causal: bool, window: int | None = None, strict: bool = False) -> Array:
        """Boolean (b or 1, 1, t, s): may query i look at key j?

        Causal: j ≤ i, or j < i when `strict`. Window w: |i − j| < w.
        """
        xp = namespace(self.q_position)
        i = self.q_position[:, :, None]
        j = self.k_position[:, None, :]
        if causal:
            seen = j < i if strict else j <= i
        else:
            seen = i == i
            seen = seen & (j == j)
        if window is not None:
            seen = seen & (xp.abs(i - j) < window)
        if self.q_valid is not None:
            seen = seen & self.q_valid[:, :, None]
        if self.k_valid is not None:
            seen = seen & self.k_valid[:, None, :]
        if self.q_segment is not None and self.k_segment is not None:
            seen = seen & (self.q_segment[:, :, None] == self.k_segment[:, None, :])
        return seen[:, None, :, :]

    def among_keys(self, count: int) -> Frame:
        """The frame in which the last `count` keys are the queries, as in a preconditioner."""

        def last(side: Array | None) -> Array | None:
            return None if side is None else side[:, side.shape[1] - count :]

        return self._replace(
            q_position=last(self.k_position),
            q_valid=last(self.k_valid),
            q_segment=last(self.k_segment),
        )


def has_lengths_only(frame: Frame) -> bool:
    """Whether in a full call nothing is hidden but padding at the end, of queries as of keys.

    A causal query that counts then sees no padding, and needs no mask. False where it is not known.
    """
    q_valid, k_valid = frame.q_valid, frame.k_valid
    if frame.k_segment is not None or q_valid is None or k_valid is None:
        return False
    if q_valid is k_valid:
        return True
    if is_traced(k_valid) or q_valid.shape != k_valid.shape:
        return False
    return bool(namespace(k_valid).all(q_valid == k_valid))


def full_frame(
    t: int,
    s: int,
    like: Array,
    *,
    lengths: Array | None = None,
    key_mask: Array | None = None,
    segment_ids: Array | None = None,
) -> Frame:
    """The frame of a call of t queries and s keys; lengths (b,), the others (b, s)."""
    k_position = arange_like(s, like)[None, :]
    q_position = arange_like(t, like)[None, :] + (s - t)
    q_valid, k_valid = None, key_mask
    if lengths is not None:
        within = k_position < lengths[:, None]
        q_valid = within if t == s else q_position < lengths[:, None]
        k_valid = within if key_mask is None else within & key_mask
    q_segment = None if segment_ids is None else segment_ids[:, s - t :]
    return Frame(q_position, k_position, q_valid, k_valid, q_segment, segment_ids)


def extending_frame(
    length: Array,
    capacity: int,
    t: int,
    *,
    lengths: Array | None,
    key_mask: Array | None,
    past_mask: Array | None,
) -> Frame:
    """The frame of t new tokens behind `length` (b,) tokens in a cache of `capacity` slots."""
    xp = namespace(length)
    slot = arange_like(capacity, length)[None, :]
    new = arange_like(t, length)[None, :]
    start = length[:, None]
    q_position = new + start
    k_position = xp.concat([xp.broadcast_to(slot, (length.shape[0], capacity)), q_position], axis=1)
    past_valid = slot < start
    if past_mask is not None:
        past_valid = past_valid & past_mask
    q_valid = None if lengths is None else new < lengths[:, None]
    new_valid = new >= start * 0
    for mask in (q_valid, key_mask):
        new_valid = new_valid if mask is None else new_valid & mask
    k_valid = xp.concat([past_valid, new_valid], axis=1)
    return Frame(q_position, k_position, q_valid, k_valid)
