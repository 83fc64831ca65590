"""Widest keys and values of the attention kernels: softmax, LASER, PaTH.

Wider ones of LASER are read in parts.
"""

from __future__ import annotations

WIDEST_KEY = 256
WIDEST_VALUE = {"float16": 512, "bfloat16": 512, "float32": 256}
"""The widest values that fit the registers and the shared memory of a multiprocessor. Float32
allows fewer, since each factor is split into three."""

WIDEST_IN_PARTS = 1024
"""The widest keys and values of LASER's kernels."""


def is_wide(dtype: str, key: int, value: int) -> bool:
    """Whether keys or values are wider than a tile."""
    return any(width > widest for _, width, widest in limits(dtype, key, value))


def limits(dtype: str, key: int, value: int) -> tuple[tuple[str, int, int], ...]:
    """(name, width, widest supported width) of keys and of values."""
    return ("keys", key, WIDEST_KEY), ("values", value, WIDEST_VALUE[dtype])


def refuses_widths(kernels: str, dtype: str, key: int, value: int) -> str | None:
    """The reason why these kernels do not support the widths; None where they do."""
    for what, width, widest in limits(dtype, key, value):
        if width > widest:
            return (
                f"has kernels for {kernels} in {dtype} with {what} of width {widest} at most; "
                f"found {width}"
            )
    return None
