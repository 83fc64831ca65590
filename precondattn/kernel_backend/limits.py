"""Limits of kernels: widths of tiles, sizes of launch grids, and the range of float16."""

from __future__ import annotations

from precondattn.backend import Request

NARROWEST = 16
"""The least width of a tile that tensor cores multiply."""

MOST_HEADS = 65535
"""The largest size of a CUDA grid along its second and third axes, and so of batch times heads in
kernels that have these along one axis."""

LEAST_EPS = 1e-3
"""The least eps of row normalisation in float16, whose largest number is 65504."""


def padded_width(width: int, widest: int | None = None) -> int:
    """The width of a tile for `width` channels: a power of 2, at least 16."""
    padded = max(NARROWEST, 1 << (width - 1).bit_length())
    if widest is not None and padded > widest:
        raise ValueError(f"tiles hold at most {widest} channels; found {width}")
    return padded


def refuses_eps(eps: float, request: Request) -> str | None:
    """The reason to refuse this eps of row normalisation: its gradient overflows in float16."""
    if request.dtype == "float16" and "vjp" in request.verb and eps < LEAST_EPS:
        return (
            f"has a gradient in float16 if eps is at least {LEAST_EPS}, else dy / eps "
            f"overflows at rows of zeros; found {eps}"
        )
    return None
