"""The precise mode of kernels in half precision, in which factors are not rounded to one number.

By default, kernels round the factors of products to a dtype that tensor cores read: weights and
their gradients to the dtype of the call, and float32 to tf32. In precise mode, weights and their
gradients are sums of two 16-bit numbers, and in float16 a product in float32 is three products in
tf32.
"""

from __future__ import annotations

import os

VARIABLE = "PRECONDATTN_PRECISE"
"""The environment variable that, set to 1, makes all kernels precise. It is read at each launch; a
function compiled by JAX keeps the mode in which it was compiled."""


def is_precise() -> bool:
    """Whether kernels must be precise."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")
