"""The places of a recorded call's arrays in one workspace.

An array has its bytes from the first to the last step that uses it; afterwards others may have
them. The largest are placed first, each at the lowest address that is free while it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ALIGNMENT = 512
"""Addresses are multiples of this number of bytes, as those of PyTorch's allocator are."""


class Lifetime(NamedTuple):
    """The steps that use an array, and its size."""

    first: int
    last: int
    size: int
    """The number of bytes."""


def offsets_of(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """The offset of every array, and the size of the workspace, in bytes."""
    order = sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].size, lifetimes[i].first))
    offsets, placed, total = [0] * len(lifetimes), list[int](), 0
    for i in order:
        first, last, size = lifetimes[i]
        at = 0
        beside = [j for j in placed if lifetimes[j].first <= last and lifetimes[j].last >= first]
        for j in sorted(beside, key=offsets.__getitem__):
            if at + size <= offsets[j]:
                break
            at = max(at, _aligned(offsets[j] + lifetimes[j].size))
        offsets[i] = at
        placed.append(i)
        total = max(total, at + size)
    return offsets, total


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
