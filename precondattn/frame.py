"""Positions, validity, segments and masks of pairs, from which the attention mask is built.

One frame serves full calls and `extend`. In a full call of t queries and s keys, query i has
position i + s − t (bottom-right alignment). In `extend` the keys are the cache's slots followed by
the new tokens, whose positions start at the length of their own sequence.

What is known of a frame without reading an array is its `Layout`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from precondattn.arrays import Array, Arrays, arange_like, is_traced, namespace

FULL, EXTENSION = "full", "extension"


class Layout(NamedTuple):
    """What is known of positions and masks without reading an array. Hashable.

    It goes with the arrays through PyTorch's operators and JAX's compiled functions, so that an
    algorithm sees the same there as outside.
    """

    kind: str = ""
    """`"full"` or `"extension"`; empty where nothing is known."""
    t: int | None = None
    """The number of queries; None where it is a symbol of a compiler, as for `s`."""
    s: int | None = None
    """The number of keys of a full call, or of the slots of a cache."""
    masks: frozenset[str] = frozenset()
    """Which of `lengths`, `key_mask`, `past_mask`, `segment_ids`, `prefix` and `attn_mask` there
    are."""
    held: int | None = None
    """As of the frame."""
    longest: int | None = None
    """As of the frame."""

    @property
    def is_unmasked(self) -> bool:
        """Whether every token may be read, but for causality."""
        return self.held is not None or (self.kind == FULL and not self.masks)

    @property
    def has_lengths_only(self) -> bool:
        """Whether a full call masks only padding at the end, the same for queries and keys."""
        is_square = self.t is not None and self.t == self.s
        return self.kind == FULL and is_square and self.masks == {"lengths"}

    @property
    def without_symbols(self) -> Layout:
        """The layout without sizes that are symbols, which have no hash."""
        t, s = (n if isinstance(n, int) else None for n in (self.t, self.s))
        return self._replace(t=t, s=s)


UNKNOWN = Layout()


class Frame:
    """Positions, validity and segments of queries (b, t) and keys (b, s).

    The batch axis of positions is 1 where all sequences share them. Validity and segments are None
    where the call has none, so that a backend knows that nothing is masked without reading arrays.
    So are the masks of pairs: `q_prefix` (b, t), the position before which a query sees all keys of
    its segment, and `pairs` (b or 1, h or 1, t, s), which is False where a query may not attend.
    """

    layout: Layout
    """What is known without reading an array: the same in every call, with a gradient or without,
    compiled or not."""

    held: int | None
    """In `extend`: the number of tokens in every sequence's cache. None unless all sequences have
    the same number, no cached or new token is masked, and the number is known on the host without
    waiting for a device."""

    longest: int | None
    """In `extend`: the number of tokens in the fullest cache; None where it is not known on the
    host."""

    may_overwrite: bool = False
    """In `extend`: whether a step may write new states and tokens into the cache's buffers."""

    _is_lazy = False
    """Whether it was made by `of`, from these masks."""
    _masks: Mapping[str, Array]

    def __init__(
        self,
        q_position: Array,
        k_position: Array,
        q_valid: Array | None = None,
        k_valid: Array | None = None,
        q_segment: Array | None = None,
        k_segment: Array | None = None,
        q_prefix: Array | None = None,
        pairs: Array | None = None,
        *,
        layout: Layout = UNKNOWN,
    ) -> None:
        self.q_position, self.q_valid, self.q_segment = q_position, q_valid, q_segment
        self.k_position, self.k_valid, self.k_segment = k_position, k_valid, k_segment
        self.q_prefix, self.pairs = q_prefix, pairs
        self.layout, self.held, self.longest = layout, layout.held, layout.longest
        self._like = q_position

    @classmethod
    def of(cls, layout: Layout, like: Array, masks: Mapping[str, Array] | None = None) -> Frame:
        """The frame of an extension, or of a full call without masks.

        Its arrays are computed when they are first read: many algorithms never read them, and they
        would take a large part of the time of a small call.

        Parameters
        ----------
        like
            the lengths (b,) of the caches, or any array of a full call
        """
        frame = cls.__new__(cls)
        frame.layout, frame.held, frame.longest = layout, layout.held, layout.longest
        frame._like, frame._masks, frame._is_lazy = like, masks or {}, True
        frame.q_segment = frame.k_segment = frame._masks.get("segment_ids")
        frame.q_prefix, frame.pairs = (frame._masks.get(n) for n in ("prefix", "attn_mask"))
        if "lengths" not in frame._masks:
            frame.q_valid = None
        if layout.kind == FULL:
            frame.k_valid = None
        return frame

    @property
    def _sizes(self) -> tuple[int, int]:
        t, s = self.layout.t, self.layout.s
        assert t is not None
        assert s is not None
        return t, s

    @cached_property
    def q_position(self) -> Array:
        """The positions of the queries (b or 1, t), integers.

        In `extend` they begin at the number of cached tokens, and in a full call at s − t.
        """
        (t, s), like = self._sizes, self._like
        if self.layout.kind == EXTENSION:
            return arange_like(t, like)[None, :] + like[:, None]
        return self.k_position[:, s - t :] if s >= t else arange_like(t, like)[None, :] + (s - t)

    @cached_property
    def k_position(self) -> Array:
        """The positions of the keys (b or 1, s), integers from 0.

        In `extend` the keys are the slots of the cache, filled or not, and the new tokens.
        """
        position = arange_like(self._sizes[1], self._like)[None, :]
        if self.layout.kind == FULL:
            return position
        xp, shape = namespace(position), (self._like.shape[0], position.shape[1])
        return xp.concat([xp.broadcast_to(position, shape), self.q_position], axis=1)

    @cached_property
    def q_valid(self) -> Array | None:
        """Which queries are no padding (b, t), boolean; None where all are."""
        lengths = self._masks["lengths"]
        return arange_like(self._sizes[0], lengths)[None, :] < lengths[:, None]

    @cached_property
    def k_valid(self) -> Array | None:
        """Which keys may be read (b, s), boolean; None where all may be."""
        return self._valid_after(self._sizes[1])

    def _valid_after(self, slots: int) -> Array:
        """Which of the first slots and of the new tokens (b, slots + t) may be read."""
        length, masks = self._like, self._masks
        start, new = length[:, None], arange_like(self._sizes[0], length)[None, :]
        past_valid = arange_like(slots, length)[None, :] < start
        if "past_mask" in masks:
            past_valid = past_valid & masks["past_mask"][:, :slots]
        new_valid = new >= start * 0
        if self.q_valid is not None:
            new_valid = new_valid & self.q_valid
        if "key_mask" in masks:
            new_valid = new_valid & masks["key_mask"]
        return namespace(length).concat([past_valid, new_valid], axis=1)

    def valid_keys(self, count: int) -> Array | None:
        """Which of the last `count` keys are valid (b, count); None where all are."""
        t, is_extension = self.layout.t, self.layout.kind == EXTENSION
        are_new = is_extension and t is not None and count <= t
        if are_new and self.held is not None:
            return None
        valid = self._valid_after(0) if are_new and self._is_lazy else self.k_valid
        return None if valid is None else valid[:, valid.shape[1] - count :]

    @property
    def is_traced(self) -> bool:
        """Whether its entries are unknown because a compiler traces the call."""
        return self.longest is None and is_traced(self._like)

    @property
    def masks_pairs(self) -> bool:
        """Whether there are masks of pairs of tokens."""
        return self.q_prefix is not None or self.pairs is not None

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
            self.q_prefix,
            self.pairs,
        )

    @property
    def computed(self) -> Frame:
        """The frame with all of its arrays, where sizes may be symbols of a compiler."""
        return self._with(self.layout.without_symbols)

    @property
    def sources(self) -> tuple[Array | None, ...]:
        """The arrays of which `rebuilt` makes the frame again: none that its layout tells."""
        if not self._is_lazy or not self.layout.is_unmasked:
            # Without masks of pairs, as programs have them that were exported before there were.
            return self.arrays if self.masks_pairs else self.arrays[:OF_TOKENS]
        return () if self.layout.kind == FULL else (self._like,)

    def of_slots(self, slots: int) -> Frame:
        """In `extend`: the frame of the first slots of the cache, and the new tokens."""
        layout = self.layout
        if layout.kind:
            layout = layout._replace(s=slots)
        new = self._sizes[0] if self._is_lazy else self.q_position.shape[1]

        def kept(keys: Array, axis: int = 1) -> Array:
            before = (slice(None),) * axis
            first, last = keys[(*before, slice(None, slots))], keys[(*before, slice(-new, None))]
            return namespace(keys).concat([first, last], axis=axis) if new else first

        pairs = None if self.pairs is None else kept(self.pairs, 3)
        if self._is_lazy:
            masks = dict(self._masks)
            if pairs is not None:
                masks["attn_mask"] = pairs
            if "past_mask" in masks:
                masks["past_mask"] = masks["past_mask"][:, :slots]
            return Frame.of(layout, self._like, masks)
        k_valid = None if self.k_valid is None else kept(self.k_valid)
        changes = {"k_position": kept(self.k_position), "k_valid": k_valid, "pairs": pairs}
        return self._with(layout, **changes)

    def of_held(self) -> Frame:
        """In `extend` after caches that all hold `held` tokens: the frame of these and the new
        tokens, which is that of a full call."""
        assert self.held is not None
        t = self._sizes[0]
        return Frame.of(Layout(FULL, t, self.held + t), self._like)

    def of_sequences(self, part: slice) -> Frame:
        """The frame of some sequences of the batch."""
        if self.layout.kind == FULL and not self.layout.masks:
            return self  # Without masks they share positions.
        rows = (a if a is None or a.shape[0] == 1 else a[part, ...] for a in self.arrays)
        return Frame(*rows)

    def replaced(self, **changes: Array | None) -> Frame:
        """The frame with other arrays for those named."""
        if all(getattr(self, name) is array for name, array in changes.items()):
            return self
        return self._with(UNKNOWN, **changes)

    def with_valid_keys(self, k_valid: Array) -> Frame:
        """The frame of a call whose `key_mask` masks as many keys, at other places."""
        return self._with(self.layout, k_valid=k_valid)

    def _with(self, layout: Layout, **changes: Array | None) -> Frame:
        named: Arrays = dict(zip(ARRAYS, self.arrays, strict=True)) | changes
        return Frame(**named, layout=layout)

    def visible(self, *, causal: bool, window: int | None = None, strict: bool = False) -> Array:
        """The attention mask, boolean (b or 1, h or 1, t, s): may query i attend to key j?

        Causal: j ≤ i, or j < i when `strict`. Window w: |i − j| < w. A prefix is seen by all
        queries of its segment, whatever causality and window say.
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
        if self.q_prefix is not None:
            mask = mask | (j < self.q_prefix[:, :, None])
        if self.q_valid is not None:
            mask = mask & self.q_valid[:, :, None]
        if self.k_valid is not None:
            mask = mask & self.k_valid[:, None, :]
        if self.q_segment is not None and self.k_segment is not None:
            mask = mask & (self.q_segment[:, :, None] == self.k_segment[:, None, :])
        mask = mask[:, None, :, :]
        return mask if self.pairs is None else mask & self.pairs

    def among_keys(self, count: int) -> Frame:
        """The frame in which the last `count` keys are also the queries.

        A preconditioner that relates keys to keys uses it.
        """
        layout = self.layout
        # A key that `key_mask` masks is still a query.
        is_same = layout.kind == FULL and "key_mask" not in layout.masks
        if layout.t == count and (is_same or self.held is not None):
            return self
        if self._is_lazy and layout.kind == FULL:
            return Frame.of(layout._replace(t=count), self._like)

        def last(array: Array | None) -> Array | None:
            return None if array is None else array[:, array.shape[1] - count :]

        return self.replaced(
            q_position=last(self.k_position),
            q_valid=last(self.k_valid),
            q_segment=last(self.k_segment),
        )


TOKEN_ARRAYS = ("q_position", "k_position", "q_valid", "k_valid", "q_segment", "k_segment")
ARRAYS = (*TOKEN_ARRAYS, "q_prefix", "pairs")
OF_TOKENS = len(TOKEN_ARRAYS)
"""How many of a frame's arrays are no masks of pairs."""


def rebuilt(layout: Layout, sources: Sequence[Array | None], like: Array) -> Frame:
    """The frame of this layout and these `sources`, on the device of `like`."""
    if len(sources) >= OF_TOKENS:
        return Frame(*sources, layout=layout)
    return Frame.of(layout, sources[0] if sources else like)


def has_lengths_only(frame: Frame) -> bool:
    """Whether a full call masks only padding at the end, the same for queries and keys.

    The causal mask then already excludes padding from every valid query. False where this is not
    known on the host.
    """
    q_valid, k_valid = frame.q_valid, frame.k_valid
    if frame.k_segment is not None or frame.masks_pairs or q_valid is None or k_valid is None:
        return False
    if frame.layout.has_lengths_only:
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
    prefix: Array | None = None,
    attn_mask: Array | None = None,
) -> Frame:
    """The frame of a full call of t queries and s keys.

    `lengths` is (b,); `key_mask` and `segment_ids` are (b, s); `prefix` is the frame's `q_prefix`,
    and `attn_mask` its `pairs`.
    """
    masks = {"lengths": lengths, "key_mask": key_mask, "segment_ids": segment_ids}
    masks |= {"prefix": prefix, "attn_mask": attn_mask}
    given = frozenset(name for name, mask in masks.items() if mask is not None)
    if not given:
        frame = Frame.of(Layout(FULL, t, s), like)
        return frame if isinstance(t, int) and isinstance(s, int) else frame.computed
    k_position = arange_like(s, like)[None, :]
    q_position = arange_like(t, like)[None, :] + (s - t)
    q_valid, k_valid = None, key_mask
    if lengths is not None:
        within = k_position < lengths[:, None]
        q_valid = within if t == s else q_position < lengths[:, None]
        k_valid = within if key_mask is None else within & key_mask
    q_segment = None if segment_ids is None else segment_ids[:, s - t :]
    layout = Layout(FULL, t, s, given).without_symbols
    of_tokens = q_position, k_position, q_valid, k_valid, q_segment, segment_ids
    return Frame(*of_tokens, prefix, attn_mask, layout=layout)


def held_by_all(lengths: list[int], t: int, capacity: int) -> int | None:
    """How many tokens every cache holds, if they hold equally many and have room for t more."""
    if not lengths or lengths.count(lengths[0]) < len(lengths):
        return None
    held = lengths[0]
    return held if held >= 0 and (not capacity or held + t <= capacity) else None


def extending_frame(
    length: Array, capacity: int, t: int, *, longest: int | None = None, **masks: Array | None
) -> Frame:
    """The frame of t new tokens after `length` (b,) tokens in a cache of `capacity` slots.

    Masks are `lengths` (b,), `key_mask` and `segment_ids` (b, t), `past_mask` (b, capacity), and
    `prefix` and `attn_mask`, the frame's `q_prefix` and `pairs`.
    """
    given = {name: mask for name, mask in masks.items() if mask is not None}
    layout = Layout(EXTENSION, t, capacity, frozenset(given), longest=longest)
    frame = Frame.of(layout, length, given)
    return frame.computed if longest is None else frame


def runs(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first token of each segment of ids (b, s), and its number of tokens.

    Tokens are counted over all sequences: token i of sequence j is j s + i.
    """
    is_first = np.ones(ids.shape, dtype=bool)
    is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = np.flatnonzero(is_first)
    return starts, np.diff(starts, append=ids.size)
