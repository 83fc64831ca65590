"""Positions, validity and segments, from which the attention mask is built.

One frame serves full calls and `extend`. In a full call of t queries and s keys, query i has
position i + s − t (bottom-right alignment). In `extend` the keys are the cache's slots followed by
the new tokens, whose positions start at the length of their own sequence.
"""

from __future__ import annotations

import numpy as np

from precondattn.arrays import Array, arange_like, is_traced, namespace


class Frame:
    """Positions, validity and segments of queries (b, t) and keys (b, s).

    The batch axis of positions is 1 where all sequences share them. Validity and segments are None
    where the call has none, so that a backend knows that nothing is masked without reading arrays.
    """

    held: int | None = None
    """In `extend`: the number of tokens in every sequence's cache. None unless all sequences have
    the same number, no cached or new token is masked, and the number is known on the host without
    waiting for a device."""

    longest: int | None = None
    """In `extend`: the number of tokens in the fullest cache; None where it is not known on the
    host."""

    may_overwrite: bool = False
    """In `extend`: whether a step may write new states and tokens into the cache's buffers."""

    def __init__(
        self,
        q_position: Array,
        k_position: Array,
        q_valid: Array | None = None,
        k_valid: Array | None = None,
        q_segment: Array | None = None,
        k_segment: Array | None = None,
    ) -> None:
        self._q_position, self.q_valid, self.q_segment = q_position, q_valid, q_segment
        self._k_position, self._k_valid, self.k_segment = k_position, k_valid, k_segment

    @property
    def q_position(self) -> Array:
        return self._q_position

    @property
    def k_position(self) -> Array:
        return self._k_position

    @property
    def k_valid(self) -> Array | None:
        return self._k_valid

    def valid_keys(self, count: int) -> Array | None:
        """Which of the last `count` keys are valid (b, count); None where all are."""
        valid = self.k_valid
        return None if valid is None else valid[:, valid.shape[1] - count :]

    @property
    def is_traced(self) -> bool:
        """Whether its entries are unknown because a compiler traces the call."""
        return is_traced(self.q_position)

    @property
    def arrays(self) -> tuple[Array | None, ...]:
        """All arrays, in the order of the constructor's arguments."""
        return (
            self.q_position,
            self.k_position,
            self.q_valid,
            self.k_valid,
            self.q_segment,
            self.k_segment,
        )

    def of_slots(self, slots: int) -> Frame:
        """In `extend`: the frame of the first slots of the cache, and the new tokens."""
        xp, capacity = (
            namespace(self.k_position),
            self.k_position.shape[1] - self.q_position.shape[1],
        )

        def kept(keys: Array) -> Array:
            return xp.concat([keys[:, :slots], keys[:, capacity:]], axis=1)

        k_valid = None if self.k_valid is None else kept(self.k_valid)
        return self.replaced(k_position=kept(self.k_position), k_valid=k_valid)

    def replaced(self, **changes: Array | None) -> Frame:
        """A copy of the frame in which the named arrays are replaced."""
        return Frame(**(dict(zip(ARRAYS, self.arrays, strict=True)) | changes))

    def visible(self, *, causal: bool, window: int | None = None, strict: bool = False) -> Array:
        """The attention mask, boolean (b or 1, 1, t, s): may query i attend to key j?

        Causal: j ≤ i, or j < i when `strict`. Window w: |i − j| < w.
        """
        xp = namespace(self.q_position)
        i = self.q_position[:, :, None]
        j = self.k_position[:, None, :]
        if causal:
            mask = j < i if strict else j <= i
        else:
            mask = i == i
            mask = mask & (j == j)
        if window is not None:
            mask = mask & (xp.abs(i - j) < window)
        if self.q_valid is not None:
            mask = mask & self.q_valid[:, :, None]
        if self.k_valid is not None:
            mask = mask & self.k_valid[:, None, :]
        if self.q_segment is not None and self.k_segment is not None:
            mask = mask & (self.q_segment[:, :, None] == self.k_segment[:, None, :])
        return mask[:, None, :, :]

    def among_keys(self, count: int) -> Frame:
        """The frame in which the last `count` keys are also the queries.

        A preconditioner that relates keys to keys uses it.
        """

        def last(array: Array | None) -> Array | None:
            return None if array is None else array[:, array.shape[1] - count :]

        return self.replaced(
            q_position=last(self.k_position),
            q_valid=last(self.k_valid),
            q_segment=last(self.k_segment),
        )


ARRAYS = ("q_position", "k_position", "q_valid", "k_valid", "q_segment", "k_segment")


class UniformFrame(Frame):
    """The frame of t new tokens after caches that all hold `held` tokens, with nothing masked.

    Its arrays are computed when they are first read. A backend that uses `held` rarely reads them,
    and computing them would take a large part of the time of a one-token step.
    """

    held: int

    def __init__(self, length: Array, held: int, slots: int, t: int) -> None:
        self.held, self.slots, self.t, self._length = held, slots, t, length
        self.longest = held
        super().__init__(None, None)

    @property
    def q_position(self) -> Array:
        if self._q_position is None:
            new = arange_like(self.t, self._length) + self.held
            self._q_position = self._for_each_sequence(new)
        return self._q_position

    @property
    def k_position(self) -> Array:
        if self._k_position is None:
            slots = self._for_each_sequence(arange_like(self.slots, self._length))
            self._k_position = namespace(slots).concat([slots, self.q_position], axis=1)
        return self._k_position

    @property
    def is_traced(self) -> bool:
        return False

    @property
    def k_valid(self) -> Array | None:
        if self._k_valid is None:
            xp = namespace(self._length)
            cached = self.k_position[:, : self.slots] < self.held
            new = xp.ones_like(self.q_position, dtype=xp.bool)
            self._k_valid = xp.concat([cached, new], axis=1)
        return self._k_valid

    def valid_keys(self, count: int) -> Array | None:
        return None if count <= self.t else super().valid_keys(count)

    def of_slots(self, slots: int) -> UniformFrame:
        return UniformFrame(self._length, self.held, slots, self.t)

    def trimmed(self) -> Frame:
        """The frame of the filled slots and the new tokens, without the unused slots."""
        return _TrimmedFrame(self._length, self.held, self.held, self.t)

    def _for_each_sequence(self, row: Array) -> Array:
        """The row (s) broadcast to (b, s)."""
        shape = (self._length.shape[0], row.shape[0])
        return namespace(row).broadcast_to(row[None, :], shape)


class _TrimmedFrame(UniformFrame):
    """A uniform frame without unused slots: every key is valid."""

    @property
    def k_valid(self) -> None:
        return None


class RaggedFrame(Frame):
    """The frame of t new tokens after caches that hold at most `longest` tokens.

    The arrays of all slots are computed when they are first read. A step reads those of the filled
    slots (`of_slots`), so that its time does not depend on the capacity.
    """

    longest: int

    def __init__(
        self,
        length: Array,
        longest: int,
        slots: int,
        t: int,
        *,
        lengths: Array | None,
        key_mask: Array | None,
        past_mask: Array | None,
    ) -> None:
        self.longest, self.slots, self.t, self._length = longest, slots, t, length
        self._masks = {"lengths": lengths, "key_mask": key_mask, "past_mask": past_mask}
        new = arange_like(t, length)[None, :]
        q_valid = None if lengths is None else new < lengths[:, None]
        super().__init__(new + length[:, None], None, q_valid)

    @property
    def k_position(self) -> Array:
        if self._k_position is None:
            self._k_position = _key_positions(self.q_position, self.slots)
        return self._k_position

    @property
    def is_traced(self) -> bool:
        return False

    @property
    def k_valid(self) -> Array:
        if self._k_valid is None:
            self._k_valid = _valid_keys(self._length, self.slots, self.t, **self._masks)
        return self._k_valid

    def valid_keys(self, count: int) -> Array | None:
        if count > self.t:
            return super().valid_keys(count)
        return _valid_keys(self._length, 0, self.t, **self._masks)[:, self.t - count :]

    def of_slots(self, slots: int) -> RaggedFrame:
        past_mask = self._masks["past_mask"]
        masks = self._masks | {"past_mask": None if past_mask is None else past_mask[:, :slots]}
        return RaggedFrame(self._length, self.longest, slots, self.t, **masks)


def _key_positions(q_position: Array, slots: int) -> Array:
    """The positions (b, slots + t) of the slots and of the new tokens."""
    xp = namespace(q_position)
    slot = arange_like(slots, q_position)[None, :]
    shape = (q_position.shape[0], slots)
    return xp.concat([xp.broadcast_to(slot, shape), q_position], axis=1)


def _valid_keys(
    length: Array,
    slots: int,
    t: int,
    *,
    lengths: Array | None,
    key_mask: Array | None,
    past_mask: Array | None,
) -> Array:
    """Which slots and new tokens (b, slots + t) may be read."""
    start, new = length[:, None], arange_like(t, length)[None, :]
    past_valid = arange_like(slots, length)[None, :] < start
    if past_mask is not None:
        past_valid = past_valid & past_mask[:, :slots]
    new_valid = new >= start * 0
    if lengths is not None:
        new_valid = new_valid & (new < lengths[:, None])
    if key_mask is not None:
        new_valid = new_valid & key_mask
    return namespace(length).concat([past_valid, new_valid], axis=1)


class UnmaskedFrame(Frame):
    """The frame of a full call of t queries and s keys, with nothing masked.

    Its positions are computed when they are first read, which many algorithms never do.
    """

    def __init__(self, t: int, s: int, like: Array) -> None:
        self.t, self.s, self._like = t, s, like
        super().__init__(None, None)

    @property
    def q_position(self) -> Array:
        if self._q_position is None:
            shared = self.s - self.t
            if shared >= 0:
                self._q_position = self.k_position[:, shared:]
            else:
                self._q_position = arange_like(self.t, self._like)[None, :] + shared
        return self._q_position

    @property
    def k_position(self) -> Array:
        if self._k_position is None:
            self._k_position = arange_like(self.s, self._like)[None, :]
        return self._k_position

    @property
    def is_traced(self) -> bool:
        return is_traced(self._like)


def has_lengths_only(frame: Frame) -> bool:
    """Whether a full call masks only padding at the end, the same for queries and keys.

    The causal mask then already excludes padding from every valid query. False where this is not
    known on the host.
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
    """The frame of a full call of t queries and s keys.

    `lengths` is (b,); `key_mask` and `segment_ids` are (b, s).
    """
    if lengths is None and key_mask is None and segment_ids is None:
        return UnmaskedFrame(t, s, like)
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
    longest: int | None = None,
) -> Frame:
    """The frame of t new tokens after `length` (b,) tokens in a cache of `capacity` slots."""
    masks = {"lengths": lengths, "key_mask": key_mask, "past_mask": past_mask}
    frame = RaggedFrame(length, capacity if longest is None else longest, capacity, t, **masks)
    return Frame(*frame.arrays) if longest is None else frame


def runs(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first token of each segment of ids (b, s), and its number of tokens.

    Tokens are counted over all sequences: token i of sequence j is j s + i.
    """
    is_first = np.ones(ids.shape, dtype=bool)
    is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = np.flatnonzero(is_first)
    return starts, np.diff(starts, append=ids.size)
