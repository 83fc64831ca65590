"""The precise mode of kernels in half precision, in which factors are not rounded to one number.

By default, weights and their gradients are rounded to the dtype of the call, and float32 to tf32.
In precise mode they are sums of two 16-bit numbers, and a product in float32 is three in tf32.
"""

from __future__ import annotations

import os

VARIABLE = "PRECONDATTN_PRECISE"
"""The environment variable that, set to 1, makes all kernels precise. It is read at each launch; a
function compiled by JAX keeps the mode in which it was compiled."""


def is_precise() -> bool:
    """Whether kernels must be precise."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")
