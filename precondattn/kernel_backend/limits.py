"""Widths of tiles, the size of a launch grid, and the range of float16."""

from __future__ import annotations

from precondattn.backend import Request

NARROWEST = 16
"""Tensor cores multiply tiles of at least this width."""

MOST_HEADS = 65535
"""The largest size of a CUDA grid along its second and its third axis. Kernels that have the heads
of all sequences along one of them support no more."""

LEAST_EPS = 1e-3
"""The least eps of unit rows in float16, whose largest number is 65504."""


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


def refuses_eps(eps: float, request: Request) -> str | None:
    """Why rows can not be divided by their norms plus eps: the gradient in float16 overflows."""
    if request.dtype == "float16" and "vjp" in request.verb and eps < LEAST_EPS:
        return (
            f"has a gradient in float16 if eps is at least {LEAST_EPS}, else dy / eps "
            f"overflows at rows of zeros; found {eps}"
        )
    return None
