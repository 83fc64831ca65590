"""Kernels of the CuPy backend in the simulator: dtypes, tolerances, orders of threads."""

import ml_dtypes
import numpy as np

DTYPES = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}
ORDERS = (None, "reverse", 0)
"""Orders in which blocks and threads run; 0 is the seed of a random order."""


def error(result, expected):
    """The largest difference, divided by the largest expected number or by at least 1."""
    result, expected = (np.asarray(x, np.float64) for x in (result, expected))
    assert result.shape == expected.shape
    return np.max(np.abs(result - expected), initial=0) / max(
        np.max(np.abs(expected), initial=0), 1
    )
