"""Attention masks of row blocks, evaluated only where they are not trivially true.

Rows i0 … i1 − 1 need the keys in `columns(i0, i1)`. Most of those pairs are visible: in a causal
call, all but a triangle at the end. Only the remaining pairs are masked one by one. A prefix and an
attn_mask also limit these keys, if they can be read on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from precondattn.arrays import Array, device_of, host_array
from precondattn.frame import Frame, runs
from precondattn_portable.arithmetic import Arithmetic, changed_at
from precondattn_portable.layout import Part, Tile, blocks, by_query_head, of_heads

MOST_KEPT = 4
"""The number of pair masks that are cached: with a window, two for each row block, and others for
the first blocks. It limits memory where every row block has another mask, such as in a step."""


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
    pairs: Array | None = None
    """An attn_mask (b or 1, n or 1, r or 1, t, s), by key head."""

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
        if self.frame.q_prefix is not None:
            reach = self.keys if self._prefixes is None else int(self._prefixes[1][i0:i1].max())
            if reach > 0:  # Keys from the first of the sequence on are visible.
                low, high = 0, max(high, min(reach, self.keys))
        first, last = self.offset + i0, self.offset + i1 - 1
        segments = None if self.frame.k_segment is None else self._segments
        if segments is not None and 0 <= first <= last < self.keys:
            begin, end = segments
            low, high = max(low, int(begin[first])), min(high, int(end[last]))
        if self.pairs is not None and self._marks is not None and low < high:
            seen = np.flatnonzero(self._marks[..., i0:i1, low:high].any(axis=(0, 1, 2, 3)))
            # A row without visible keys still has an output, and a sum of weights.
            ends = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 1)
            low, high = low + ends[0], low + ends[1]
        return low, max(high, low)

    def between(self, i0: int, i1: int) -> tuple[int, int]:
        """The keys after a prefix and before the window, to which none of these queries attends."""
        low, high = self.columns(i0, i1)
        if self.window is None or self.offset is None or self._prefixes is None:
            return low, low
        start = max(low, int(self._prefixes[1][i0:i1].max()))
        stop = min(self.offset + i0 - self.window + 1, high)
        return (start, stop) if start < stop else (low, low)

    def ranges(self, i0: int, i1: int) -> list[tuple[int, int]]:
        """The keys of `columns` without those `between`: one range, or two."""
        low, high = self.columns(i0, i1)
        start, stop = self.between(i0, i1)
        ranges = [(low, high)] if start == stop else [(low, start), (stop, high)]
        # A row without visible keys still has an output.
        return [(a, b) for a, b in ranges if a < b] or [(low, low + 1)]

    def tiles(self, t: int, size: int) -> Iterator[Tile]:
        """Blocks of the t queries, each with all keys that any of them may attend to."""
        for i0, i1 in blocks(t, size):
            yield Tile(i0, i1, *self.columns(i0, i1))

    def tiles_to_diagonal(self, t: int, size: int, past: int = 0) -> Iterator[Tile]:
        """Blocks of queries with the keys up to the block's last query; query 0 is key `past`."""
        for i0, i1 in blocks(t, size):
            yield Tile(i0, i1, min(self.columns(i0, i1)[0], past + i0), past + i1)

    @cached_property
    def _prefixes(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The least and the greatest end of each query's prefix (t,), over all sequences.

        None without a prefix, or if it can not be read without waiting for a device.
        """
        ends = _on_host(self.frame.q_prefix)
        return None if ends is None else (ends.min(axis=0), ends.max(axis=0))

    @cached_property
    def _marks(self) -> np.ndarray | None:
        """The attn_mask, or None if it can not be read without waiting for a device."""
        return _on_host(self.pairs)

    @cached_property
    def _segments(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The first key of each key's segment (s,), and the last plus one.

        They are the least and the greatest over all sequences. None without segments, or if their
        ids can not be read without waiting for a device.
        """
        ids = _on_host(self.frame.k_segment)
        if ids is None or ids.shape[1] != self.keys:
            return None
        starts, lengths = runs(ids)
        begin = np.repeat(starts % self.keys, lengths).reshape(ids.shape)
        end = begin + np.repeat(lengths, lengths).reshape(ids.shape)
        return begin.min(axis=0), end.max(axis=0)

    def of_sequences(self, sequences: slice) -> Mask:
        """The mask of some sequences of the batch."""
        return self.of_part((sequences, slice(None), ...))

    def of_part(self, part: Part) -> Mask:
        """The mask of some sequences and key heads."""
        frame = self.frame.of_sequences(part[0])
        pairs = None if self.pairs is None else of_heads(self.pairs, part)
        return Mask(frame, self.keys, self.offset, self.causal, self.window, self.strict, pairs)

    @property
    def is_plain(self) -> bool:
        """Whether causality is the only constraint."""
        return self.is_positional and self.window is None

    @cached_property
    def is_positional(self) -> bool:
        """Whether causality and the window are the only constraints."""
        return self._is_of_positions and self.frame.q_prefix is None

    @cached_property
    def _is_of_positions(self) -> bool:
        """Whether causality, a window and a prefix are the only constraints."""
        frame = self.frame
        is_whole = frame.q_valid is None and frame.k_valid is None and frame.k_segment is None
        return self.offset is not None and is_whole and self.pairs is None

    def apply(
        self, ops: Arithmetic, scores: Array, tile: Tile, otherwise: float = -math.inf
    ) -> Array:
        """Scores (b, n, r (i1 − i0), high − low), set to `otherwise` at masked pairs."""
        ranges = self.partly_masked(tile)
        if not ranges:
            return scores
        i0, i1, low, _ = tile
        pairs = by_query_head(ops, scores, i1 - i0)
        for start, stop in ranges:
            where = (..., slice(start - low, stop - low))
            visible = self.visible(ops, scores, Tile(i0, i1, start, stop))
            changed_at(ops.keep, pairs, where, visible, otherwise)
        return ops.reshape(pairs, scores.shape)

    def partly_masked(self, tile: Tile) -> list[tuple[int, int]]:
        """The ranges of keys that some of these queries may not attend to."""
        i0, i1, low, high = tile
        begin, end = low, low  # The range of keys that all of these queries may attend to.
        if self.is_positional:
            assert self.offset is not None
            first, last, end = self.offset + i0, self.offset + i1 - 1, high
            if self.causal:
                end = min(end, first + 1 - self.strict)
            if self.window is not None:
                begin, end = max(low, last - self.window + 1), min(end, first + self.window)
        elif self._is_of_positions and self._prefixes is not None and self.window is None:
            assert self.offset is not None
            end = self.offset + i0 + 1 - self.strict if self.causal else high
            end = min(high, max(end, int(self._prefixes[0][i0:i1].min())))
        ranges = ((low, begin), (end, high)) if begin < end else ((low, high),)
        return [(start, stop) for start, stop in ranges if start < stop]

    def visible(self, ops: Arithmetic, like: Array, tile: Tile) -> Array:
        """(b or 1, n or 1, r or 1, i1 − i0, high − low), on like's device."""
        i0, i1, low, high = tile
        if not self.is_positional:
            of_rows, of_columns = slice(i0, i1), slice(low, high)
            parts = zip(self.frame.arrays[:-1], ((of_rows, of_columns) * 4)[:-1], strict=True)
            visible = self._visible(Frame(*[a if a is None else a[:, part] for a, part in parts]))
            return visible if self.pairs is None else visible & self.pairs[..., of_rows, of_columns]
        assert self.offset is not None
        # Symbolic sizes have no hash.
        pairs = int(self.offset + i0 - low), int(i1 - i0), int(high - low)
        visible = self._of_positions.get(pairs)
        if visible is None:
            if len(self._of_positions) == MOST_KEPT:
                self._of_positions.clear()
            difference, rows, columns = pairs
            positions = ops.arange(rows, like) + difference, ops.arange(columns, like)
            visible = self._visible(Frame(positions[0][None, :], positions[1][None, :]))
            self._of_positions[pairs] = visible
        return visible

    @cached_property
    def _of_positions(self) -> dict[tuple[int, int, int], Array]:
        """Masks by position, by the position difference of the first pair and the sizes."""
        return {}

    def _visible(self, frame: Frame) -> Array:
        visible = frame.visible(causal=self.causal, window=self.window, strict=self.strict)
        return visible[:, :, None, :, :]


def _on_host(array: Array | None) -> np.ndarray | None:
    """An array that can be read without waiting for a device; None for others."""
    return None if array is None or device_of(array) != "cpu" else host_array(array)
