"""Widths of tiles, and the size of a launch grid."""

from __future__ import annotations

NARROWEST = 16
"""Tensor cores multiply tiles of at least this width."""

MOST_HEADS = 65535
"""The largest size of a CUDA grid along its second and its third axis. Kernels that have the heads
of all sequences along one of them support no more."""


def padded_width(width: int, widest: int | None = None) -> int:
    """The width of a tile that holds `width` channels: a power of two, at least 16.

    Raises
    ------
    ValueError
        when that is more than `widest`.
    """
    padded = max(NARROWEST, 1 << (width - 1).bit_length())
    if widest is not None and padded > widest:
        raise ValueError(f"tiles hold at most {widest} channels; found {width}")
    return padded
