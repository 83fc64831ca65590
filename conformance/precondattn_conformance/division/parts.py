"""The tokens of each device, and functions that cut arrays into parts and join them.

    contiguous, heads    T // P tokens each, and one more on the first T % P devices
    zigzag               the same of pairs of tokens
    cyclic               blocks of B tokens, in turn; B is the block of the case's sizes

So devices have different numbers of tokens if P does not divide T. In PyTorch a device is a
process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from precondattn.algebra.declaration import Pattern
from precondattn.arrays import Arrays
from precondattn.parallel.heads import HeadAxes
from precondattn.parallel.layouts import TokenOrder
from precondattn_conformance.inputs import CallLayout

ORDERS = ("heads", "contiguous", "zigzag", "cyclic")
"""The layouts, which are also the names of the checks."""
OF_TOKENS = ("key_mask", "segment_ids")
"""Masks with a token axis, which is the second."""


def name_of(order: str, sizes: CallLayout) -> str:
    """The layout's name as `context_parallel` reads it."""
    return f"cyclic[block={sizes.block}]" if order == "cyclic" else order


def positions(order: str, sizes: CallLayout, tokens: int, devices: int) -> list[np.ndarray]:
    """The positions in the sequence of each process's tokens."""
    if order == "cyclic":
        parts = TokenOrder.read(name_of(order, sizes)).parts_of(tokens, devices)
    else:
        pair = 2 if order == "zigzag" else 1
        counts = [pair * len(each) for each in np.array_split(np.arange(tokens // pair), devices)]
        parts = TokenOrder("zigzag" if order == "zigzag" else "contiguous").parts(counts)
    return [
        np.concatenate([_span(p.first, p.tokens) for p in parts if p.device == device])
        for device in range(devices)
    ]


def _span(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count)


class ProcessParts(NamedTuple):
    """The tokens of every process, among queries `t` and keys `s`."""

    tokens: Mapping[str, list[np.ndarray]]

    @classmethod
    def of_order(cls, order: str, sizes: CallLayout, devices: int) -> ProcessParts:
        return cls({i: positions(order, sizes, getattr(sizes, i), devices) for i in "ts"})

    @property
    def devices(self) -> int:
        return len(self.tokens["t"])

    def cut(self, array: np.ndarray, pattern: Pattern, device: int) -> np.ndarray:
        """A process's part of an array; the whole array if it has no tokens."""
        time, places = self._places(array.shape, pattern)
        return array if time is None else np.take(array, places[device], axis=time)

    def cut_mask(self, name: str, mask: np.ndarray, device: int) -> np.ndarray:
        """A process's part of a mask; the whole mask if it has no token axis."""
        return mask[:, self.tokens["s"][device]] if name in OF_TOKENS else mask

    def joined(
        self, parts: list[np.ndarray], pattern: Pattern, shape: tuple[int, ...]
    ) -> np.ndarray:
        """An array of this shape, joined from all parts; without tokens, the sum of the parts.

        A part with an unexpected shape is kept, so that the comparison reports it.
        """
        time, places = self._places(shape, pattern)
        if time is None:
            return np.asarray(np.sum(parts, axis=0))
        whole = np.full(shape, np.nan)
        for device, part in enumerate(parts):
            expected = (*shape[:time], len(places[device]), *shape[time + 1 :])
            if part.shape != expected:
                return part
            index: tuple[slice | np.ndarray, ...] = (*(slice(None),) * time, places[device])
            whole[index] = part
        return whole

    def device_of(self, letter: str, token: int) -> tuple[int, int]:
        """The process that has a token, and the token's index there."""
        for device, indices in enumerate(self.tokens[letter]):
            if token in indices:
                return device, int(np.flatnonzero(indices == token)[0])
        raise ValueError(f"no process has the token {token}")

    def _places(
        self, shape: tuple[int, ...], pattern: Pattern
    ) -> tuple[int | None, list[np.ndarray]]:
        """The token axis, and each process's indices along it."""
        time = HeadAxes.of_pattern(pattern, shape).time
        if time is None:
            return None, []
        axis = pattern.axes[time]
        each = np.arange(axis.multiple)
        indices = self.tokens[axis.letter]
        return time, [(axis.multiple * of[:, None] + each).ravel() for of in indices]


def masks_of(sizes: CallLayout, library: str) -> Arrays:
    """The masks of a call.

    In PyTorch, segments of one sequence are given by their bounds, `cu_seqlens`.
    """
    masks = sizes.masks()
    if library == "torch" and sizes.b == 1 and "segment_ids" in masks:
        (ids,) = masks.pop("segment_ids")
        ends = np.flatnonzero(np.diff(ids)) + 1
        masks["cu_seqlens"] = np.asarray([0, *ends, len(ids)], dtype=np.int32)
    return masks
