"""The frame of a call: positions and masks, from which a backend builds the attention mask.

The same class serves full calls and `extend`. In a full call of t queries and s keys, key j has
position j and query i has position i + s − t (bottom-right alignment). In `extend`, the keys are
the slots of the cache, followed by the t new tokens. The positions of the new tokens start at the
number of tokens that their sequence has in the cache.

`Layout` has the properties of a frame that are known without reading an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from precondattn.arrays import Array, Arrays, ByName, arange_like, is_traced, namespace

FULL, EXTENSION = "full", "extension"


class Layout(NamedTuple):
    """The properties of positions and masks that are known without reading an array. Hashable.

    It is passed with the arrays through PyTorch's operators and JAX's compiled functions, so that
    an algorithm has the same information inside them as outside.
    """

    kind: str = ""
    """`"full"` or `"extension"`; empty if nothing is known."""
    t: int | None = None
    """The number of queries; None if it is a compiler's symbolic size."""
    s: int | None = None
    """The number of keys of a full call, or of slots of the cache; None if it is symbolic."""
    masks: frozenset[str] = frozenset()
    """The masks of the call, of `lengths`, `key_mask`, `past_mask` (the key mask of cached tokens),
    `segment_ids`, `prefix` and `attn_mask`."""
    held: int | None = None
    longest: int | None = None

    @property
    def is_unmasked(self) -> bool:
        """Whether nothing but causality and the window masks a token."""
        return self.held is not None or (self.kind == FULL and not self.masks)

    @property
    def has_lengths_only(self) -> bool:
        """Whether `lengths` is the only mask of a full call with as many queries as keys."""
        is_square = self.t is not None and self.t == self.s
        return self.kind == FULL and is_square and self.masks == {"lengths"}

    @property
    def without_symbols(self) -> Layout:
        """The layout with None in place of symbolic sizes, which have no hash."""
        t, s = (n if isinstance(n, int) else None for n in (self.t, self.s))
        return self._replace(t=t, s=s)


UNKNOWN = Layout()


class Frame:
    """Positions and masks of the queries and keys of a call.

    A backend reads these arrays of integers and booleans. An array other than a position is None if
    the call has no such mask, so that this is known without reading an array.

    ================  ======================  ==============================================
    q_position        (b or 1, t)             positions of the queries
    k_position        (b or 1, s)             positions of the keys
    q_valid           (b, t)                  False for queries that are padding
    k_valid           (b, s)                  False for keys that no query may read
    q_segment         (b, t)                  ids of the packed segments of the queries
    k_segment         (b, s)                  ids of the packed segments of the keys
    q_prefix          (b, t)                  the query sees all keys of its segment before
                                              this position, later ones included
    pairs             (b or 1, h or 1, t, s)  False where a query may not attend to a key
    ================  ======================  ==============================================

    In `extend`, s is the number of slots of the cache plus t. `visible` combines all arrays in the
    attention mask.
    """

    layout: Layout
    """What is known without reading an array. It is the same with and without a gradient, compiled
    and not compiled."""

    held: int | None
    """The number of cached tokens, in an extension in which all sequences have equally many and no
    cached or new token is masked. None otherwise, and if the number can not be read without waiting
    for a device."""

    longest: int | None
    """The number of cached tokens of the longest sequence, in an extension. None in a full call, or
    if it is not known on the host."""

    may_overwrite: bool = False
    """Whether a step may write new states and tokens into the cache's buffers."""

    _is_lazy = False
    """Whether the frame was made by `of`; its arrays are then computed from `_masks`."""
    _masks: ByName

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
    def of(cls, layout: Layout, like: Array, masks: ByName | None = None) -> Frame:
        """The frame of a layout, whose arrays are computed from its masks when they are first read.

        Many algorithms never read them, and computing them takes much of the time of a small call.

        Parameters
        ----------
        like
            In an extension the number of cached tokens (b,), in a full call any of its arrays.
        """
        frame = cls.__new__(cls)
        frame.layout, frame.held, frame.longest = layout, layout.held, layout.longest
        frame._masks = masks = {} if masks is None else masks
        frame._like, frame._is_lazy = like, True
        frame.q_segment = frame.k_segment = masks.get("segment_ids")
        frame.q_prefix, frame.pairs = masks.get("prefix"), masks.get("attn_mask")
        if "lengths" not in masks:
            frame.q_valid = None
        if layout.kind == FULL:
            if frame.k_segment is not None:
                t, s = frame._sizes
                frame.q_segment = frame.k_segment[:, s - t :]
            if "lengths" not in masks:
                frame.k_valid = masks.get("key_mask")
        return frame

    @property
    def _sizes(self) -> tuple[int, int]:
        t, s = self.layout.t, self.layout.s
        assert t is not None
        assert s is not None
        return t, s

    @cached_property
    def q_position(self) -> Array:
        """The positions of the queries (b or 1, t), integers."""
        (t, s), like = self._sizes, self._like
        if self.layout.kind == EXTENSION:
            return arange_like(t, like)[None, :] + like[:, None]
        return self.k_position[:, s - t :] if s >= t else arange_like(t, like)[None, :] + (s - t)

    @cached_property
    def k_position(self) -> Array:
        """The positions of the keys (b or 1, s), integers from 0."""
        position = arange_like(self._sizes[1], self._like)[None, :]
        if self.layout.kind == FULL:
            return position
        xp, shape = namespace(position), (self._like.shape[0], position.shape[1])
        return xp.concat([xp.broadcast_to(position, shape), self.q_position], axis=1)

    @cached_property
    def q_valid(self) -> Array | None:
        """Which queries are not padding (b, t), boolean; None if none is padding."""
        lengths = self._masks["lengths"]
        if self.layout.kind == FULL:
            return self.q_position < lengths[:, None]
        return arange_like(self._sizes[0], lengths)[None, :] < lengths[:, None]

    @cached_property
    def k_valid(self) -> Array | None:
        """Which keys may be read (b, s), boolean; None if all may be."""
        t, s = self._sizes
        if self.layout.kind == EXTENSION:
            return self._valid_after(s)
        lengths, key_mask = self._masks["lengths"], self._masks.get("key_mask")
        within = self.q_valid if t == s else self.k_position < lengths[:, None]
        return within if key_mask is None else within & key_mask

    def _valid_after(self, slots: int) -> Array:
        """Which of the first `slots` slots and the new tokens (b, slots + t) may be read."""
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
        """Which of the last `count` keys are valid (b, count); None if all are."""
        t, is_extension = self.layout.t, self.layout.kind == EXTENSION
        are_new = is_extension and t is not None and count <= t
        if are_new and self.held is not None:
            return None
        valid = self._valid_after(0) if are_new and self._is_lazy else self.k_valid
        return None if valid is None else valid[:, valid.shape[1] - count :]

    @property
    def is_traced(self) -> bool:
        """Whether the entries of its arrays are unknown because a compiler traces the call."""
        return self.longest is None and is_traced(self._like)

    @property
    def masks_pairs(self) -> bool:
        """Whether `q_prefix` or `pairs` is given."""
        return self.q_prefix is not None or self.pairs is not None

    @property
    def arrays(self) -> tuple[Array | None, ...]:
        """All arrays, in the order of the constructor's arguments; None for those not given."""
        return tuple([getattr(self, name) for name in ARRAYS])

    @property
    def computed(self) -> Frame:
        """The frame with all of its arrays computed; sizes may be symbolic."""
        return self.changed(self.layout.without_symbols)

    @property
    def sources(self) -> tuple[Array | None, ...]:
        """The arrays from which `rebuilt` makes the frame, without those that its layout gives."""
        if not self._is_lazy or not self.layout.is_unmasked:
            # Few calls have masks of pairs, and operators get no more than they need.
            return self.arrays if self.masks_pairs else self.arrays[:OF_TOKENS]
        return () if self.layout.kind == FULL else (self._like,)

    def of_slots(self, slots: int) -> Frame:
        """The frame of an extension, restricted to the first `slots` slots and the new tokens."""
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
        return self.changed(layout, **changes)

    def of_held(self) -> Frame:
        """The frame of a full call on the cached and the new tokens of an extension."""
        assert self.held is not None
        t = self._sizes[0]
        return Frame.of(Layout(FULL, t, self.held + t), self._like)

    def of_sequences(self, part: slice) -> Frame:
        """The frame of the sequences `part` of the batch."""
        if self.layout.kind == FULL and not self.layout.masks:
            return self  # All sequences share the positions, and there are no masks.
        rows = (a if a is None or a.shape[0] == 1 else a[part, ...] for a in self.arrays)
        return Frame(*rows)

    def replaced(self, **changes: Array | None) -> Frame:
        """The frame with other arrays for the names in `changes`."""
        if all(getattr(self, name) is array for name, array in changes.items()):
            return self
        return self.changed(UNKNOWN, **changes)

    def changed(self, layout: Layout, **changes: Array | None) -> Frame:
        named: Arrays = dict(zip(ARRAYS, self.arrays, strict=True)) | changes
        return Frame(**named, layout=layout)

    def visible(self, *, causal: bool, window: int | None = None, strict: bool = False) -> Array:
        """The attention mask, boolean (b or 1, h or 1, t, s): whether query i may attend to key j.

        With positions i and j, `causal` requires j ≤ i, or j < i if `strict` is set, and a window w
        requires |i − j| < w. All queries of a segment see its prefix, whatever causality and window
        require.
        """
        i = self.q_position[:, :, None]
        j = self.k_position[:, None, :]
        if causal:
            mask = j < i if strict else j <= i
        else:
            mask = i == i
            mask = mask & (j == j)
        if window is not None:
            mask = mask & (abs(i - j) < window)
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
        """The frame of a call whose queries are the last `count` keys."""
        layout = self.layout
        # A key that `key_mask` masks is still a query.
        is_same = layout.kind == FULL and "key_mask" not in layout.masks
        if layout.t == count and (is_same or self.held is not None):
            return self
        if self._is_lazy and layout.kind == FULL and not layout.masks:
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


def rebuilt(layout: Layout, sources: Sequence[Array | None], like: Array) -> Frame:
    """The frame of this layout and these `sources`, on the device of `like`."""
    if len(sources) >= OF_TOKENS:
        return Frame(*sources, layout=layout)
    return Frame.of(layout, sources[0] if sources else like)


def has_lengths_only(frame: Frame) -> bool:
    """Whether a full call masks nothing but padding at the end, the same for queries and keys.

    Then no valid query sees padding under a causal mask. False if this is not known on the host.
    """
    q_valid, k_valid = frame.q_valid, frame.k_valid
    if frame.k_segment is not None or frame.masks_pairs or q_valid is None or k_valid is None:
        return False
    if frame.layout.has_lengths_only:
        return True
    if is_traced(k_valid) or q_valid.shape != k_valid.shape:
        return False
    return bool(namespace(k_valid).all(q_valid == k_valid))


def full_frame(t: int, s: int, like: Array, **masks: Array | None) -> Frame:
    """The frame of a full call of t queries and s keys.

    The masks are `lengths` (b,), `key_mask` and `segment_ids` (b, s), and `prefix` and `attn_mask`,
    which are the frame's `q_prefix` and `pairs`.
    """
    given_masks = {name: mask for name, mask in masks.items() if mask is not None}
    frame = Frame.of(Layout(FULL, t, s, frozenset(given_masks)), like, given_masks)
    return frame if isinstance(t, int) and isinstance(s, int) else frame.computed


def held_by_all(lengths: list[int], t: int, capacity: int) -> int | None:
    """The number of tokens in every cache, if it is the same and t more fit; None otherwise."""
    if not lengths or lengths.count(lengths[0]) < len(lengths):
        return None
    held = lengths[0]
    return held if held >= 0 and (not capacity or held + t <= capacity) else None


def extending_frame(
    length: Array, capacity: int, t: int, *, longest: int | None = None, **masks: Array | None
) -> Frame:
    """The frame of t new tokens after `length` (b,) tokens in a cache of `capacity` slots.

    The masks are `lengths` (b,), `key_mask` and `segment_ids` (b, t), `past_mask` (b, capacity),
    and `prefix` and `attn_mask`, which are the frame's `q_prefix` and `pairs`.
    """
    given_masks = {name: mask for name, mask in masks.items() if mask is not None}
    layout = Layout(EXTENSION, t, capacity, frozenset(given_masks), longest=longest)
    frame = Frame.of(layout, length, given_masks)
    return frame.computed if longest is None else frame


def runs(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first token, and the number of tokens, of each segment of ids (b, s).

    Tokens are counted over all sequences: token i of sequence j is j s + i.
    """
    is_first = np.ones(ids.shape, dtype=bool)
    is_first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = np.flatnonzero(is_first)
    return starts, np.diff(starts, append=ids.size)
