"""Attention masks of row blocks, evaluated only where they are not trivially true.

Rows i0 … i1 − 1 need the keys in `columns(i0, i1)`. Most of those pairs are visible: in a causal
call, all but a triangle at the end. Only the remaining pairs are masked one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from precondattn.arrays import Array, device_of, host_array
from precondattn.frame import Frame, runs
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.in_place import keep_at

MOST_KNOWN = 4
"""Masks of pairs that are kept: with a window, each row block has two, and the first blocks others.
Where every row block has pairs of its own, such as in a step, no more than these are in memory."""


@dataclass(frozen=True)
class Mask:
    """The frame of some sequences, and the mechanism's causality and window."""

    frame: Frame
    keys: int
    """Number of keys."""
    offset: int | None
    """Position of the first query among the keys; None where sequences differ in it."""
    causal: bool = True
    window: int | None = None
    strict: bool = False

    def columns(self, i0: int, i1: int) -> tuple[int, int]:
        """The first key that any of these queries may attend to, and the last plus one."""
        if self.offset is None:
            return 0, self.keys
        low, high = 0, self.keys
        if self.causal:
            high = min(high, self.offset + i1 - self.strict)
        if self.window is not None:
            low = max(low, self.offset + i0 - self.window + 1)
            high = min(high, self.offset + i1 - 1 + self.window)
        first, last = self.offset + i0, self.offset + i1 - 1
        if self._segments is not None and 0 <= first <= last < self.keys:
            begin, end = self._segments
            low, high = max(low, int(begin[first])), min(high, int(end[last]))
        return low, max(high, low)

    @cached_property
    def _segments(self) -> tuple[np.ndarray, np.ndarray] | None:
        """For each key (s,) the first key of its segment, and the last plus one.

        The least and the greatest of all sequences. None without segments, or where their ids can
        not be read without waiting for a device.
        """
        ids = self.frame.k_segment
        ids = None if ids is None or device_of(ids) != "cpu" else host_array(ids)
        if ids is None or ids.shape[1] != self.keys:
            return None
        starts, lengths = runs(ids)
        begin = np.repeat(starts % self.keys, lengths).reshape(ids.shape)
        end = begin + np.repeat(lengths, lengths).reshape(ids.shape)
        return begin.min(axis=0), end.max(axis=0)

    def of_sequences(self, sequences: slice) -> Mask:
        """The mask of some sequences of the batch."""
        frame = self.frame.of_sequences(sequences)
        return Mask(frame, self.keys, self.offset, self.causal, self.window, self.strict)

    @property
    def is_plain(self) -> bool:
        """Whether causality is the only constraint."""
        return self.is_positional and self.window is None

    @property
    def is_positional(self) -> bool:
        """Whether causality and the window are the only constraints."""
        masks = (self.frame.q_valid, self.frame.k_valid, self.frame.k_segment)
        return self.offset is not None and all(mask is None for mask in masks)

    def apply(
        self,
        ops: Arithmetic,
        row_block: Array,
        i0: int,
        i1: int,
        low: int,
        high: int,
        otherwise: float = -math.inf,
    ) -> Array:
        """Scores (b, n, r, i1 − i0, high − low), set to `otherwise` at masked pairs."""
        for start, stop in self._partly_masked(i0, i1, low, high):
            where = (..., slice(start - low, stop - low))
            keep_at(ops, row_block, where, self.visible(i0, i1, start, stop), otherwise)
        return row_block

    def _partly_masked(self, i0: int, i1: int, low: int, high: int) -> list[tuple[int, int]]:
        """The ranges of keys that some of these queries may not attend to."""
        begin, end = low, low  # The keys that all of them may attend to.
        if self.is_positional:
            assert self.offset is not None
            first, last, end = self.offset + i0, self.offset + i1 - 1, high
            if self.causal:
                end = min(end, first + 1 - self.strict)
            if self.window is not None:
                begin, end = max(low, last - self.window + 1), min(end, first + self.window)
        ranges = ((low, begin), (end, high)) if begin < end else ((low, high),)
        return [(start, stop) for start, stop in ranges if start < stop]

    def visible(self, i0: int, i1: int, low: int, high: int) -> Array:
        """(b or 1, 1, 1, i1 − i0, high − low)"""
        if not self.is_positional:
            return self._visible(i0, i1, low, high)
        assert self.offset is not None
        pairs = self.offset + i0 - low, i1 - i0, high - low
        if pairs not in self._known:
            if len(self._known) == MOST_KNOWN:
                self._known.clear()
            self._known[pairs] = self._visible(i0, i1, low, high)
        return self._known[pairs]

    @cached_property
    def _known(self) -> dict[tuple[int, int, int], Array]:
        """What is visible among positions, by their difference at the first pair, and the sizes."""
        return {}

    def _visible(self, i0: int, i1: int, low: int, high: int) -> Array:
        rows, columns = slice(i0, i1), slice(low, high)

        def part_of(array: Array | None, part: slice) -> Array | None:
            return None if array is None else array[:, part]

        frame = Frame(
            part_of(self.frame.q_position, rows),
            part_of(self.frame.k_position, columns),
            part_of(self.frame.q_valid, rows),
            part_of(self.frame.k_valid, columns),
            part_of(self.frame.q_segment, rows),
            part_of(self.frame.k_segment, columns),
        )
        visible = frame.visible(causal=self.causal, window=self.window, strict=self.strict)
        return visible[:, :, None, :, :]
