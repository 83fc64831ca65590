"""The token in each slot of each window.

The grid is padded to whole windows, rolled by the shift, and divided. A window at the border then
has slots without a token, or tokens of two windows that do not attend to each other; such pairs
are masked ("hidden"). All other windows come first, and need no mask.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from precondattn.limits import KEPT
from precondattn.spec.grid_windows import GridWindows


class WindowPart(NamedTuple):
    """Windows of the same kind. The arrays are NumPy's."""

    tokens: np.ndarray
    """(windows, w): a slot without a token has another token of its window, with no pairs"""
    hidden: np.ndarray | None
    """Which pairs do not attend to each other (windows, w, w); None where all do."""

    def some(self, start: int, stop: int) -> WindowPart:
        """The windows start … stop − 1."""
        hidden = None if self.hidden is None else self.hidden[start:stop]
        return WindowPart(self.tokens[start:stop], hidden)


class Partition(NamedTuple):
    """The windows of a call, and the slot of each token."""

    parts: tuple[WindowPart, ...]
    slots: np.ndarray
    """(s,): the slot of each token, over all parts."""
    entries: np.ndarray
    """(w w,): the table's entry of each pair of slots."""


@lru_cache(maxsize=KEPT)
def partition(windows: GridWindows, s: int) -> Partition:
    """The windows of a grid of s tokens."""
    shape = (s,) if windows.columns is None else (-(-s // windows.columns), windows.columns)
    whole = tuple(-(-n // w) * w for n, w in zip(shape, windows.size, strict=True))
    token = np.full(whole, -1)
    inner = np.full(np.prod(shape), -1)
    inner[:s] = np.arange(s)
    token[tuple(slice(n) for n in shape)] = inner.reshape(shape)
    label = np.zeros(whole, dtype=np.int64)
    for axis, (n, w, shift) in enumerate(zip(whole, windows.size, windows.shift, strict=True)):
        of_axis = (np.arange(n) - shift) // w
        along = [-1 if each == axis else 1 for each in range(len(whole))]
        label = label * (n + 2) + of_axis.reshape(along)  # Numbers are −1 to n.
    tokens, labels = (_cut(a, windows) for a in (token, label))
    has_tokens = (tokens >= 0).any(axis=1)
    tokens, labels = tokens[has_tokens], labels[has_tokens]
    is_token = tokens >= 0
    hidden = labels[:, :, None] != labels[:, None, :]
    hidden = hidden | ~is_token[:, :, None] | ~is_token[:, None, :]
    at_border = hidden.any(axis=(1, 2))
    order = np.argsort(at_border, kind="stable")
    tokens, hidden, is_token = tokens[order], hidden[order], is_token[order]
    slots = np.empty(s, dtype=np.int64)
    slots[tokens[is_token]] = np.flatnonzero(is_token)
    first = np.take_along_axis(tokens, is_token.argmax(axis=1)[:, None], axis=1)
    tokens = np.where(is_token, tokens, first)
    plain = len(tokens) - int(at_border.sum())
    kinds = WindowPart(tokens[:plain], None), WindowPart(tokens[plain:], hidden[plain:])
    parts = tuple(part for part in kinds if len(part.tokens))
    # A window is a grid of its own.
    window = windows._replace(columns=windows.columns and windows.size[1])
    slot = np.arange(tokens.shape[1])[None, :]
    return Partition(parts, slots, window.entry(slot, slot).ravel())


def _cut(grid: np.ndarray, windows: GridWindows) -> np.ndarray:
    """A grid, rolled by the shift, as (windows, w)."""
    rolled = np.roll(grid, [-shift for shift in windows.shift], tuple(range(grid.ndim)))
    sides = [side for n, w in zip(grid.shape, windows.size, strict=True) for side in (n // w, w)]
    order = (*range(0, 2 * grid.ndim, 2), *range(1, 2 * grid.ndim, 2))
    return rolled.reshape(sides).transpose(order).reshape(-1, int(np.prod(windows.size)))
