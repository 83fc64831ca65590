"""Whether kernels in half precision take more products than rounding their factors once needs.

By default they round a factor once to what tensor cores read: weights and their gradients to the
dtype of the call, float32 to tf32. In a precise kernel, weights and their gradients are the sums of
two 16-bit numbers, and in float16 a product of float32 is three of tf32.
"""

from __future__ import annotations

import os

VARIABLE = "PRECONDATTN_PRECISE"
"""Environment variable: 1 makes the kernels of all backends precise. It is read at each launch; a
function compiled by JAX keeps what it was compiled for."""


def is_precise() -> bool:
    """Whether kernels are to be precise."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")
