"""Rounding to fewer bits in the same dtype."""

from __future__ import annotations

import numpy as np

from precondattn.arrays import Array


def to_bfloat16(x: Array) -> Array:
    """x rounded to bfloat16, in the dtype of x."""
    bits = np.asarray(x).astype(np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(x.dtype)
