"""Error measures and bounds.

The oracle is computed in float64 on inputs rounded to the case's dtype, so the difference is the
error of the computation alone. It is measured over the whole array and at the worst element, each
relative to the size of the result.
"""

from __future__ import annotations

import numpy as np

BOUND = {"float64": 1e-10, "float32": 2e-5, "float16": 5e-3, "bfloat16": 2e-2}
CORRELATED_BOUND = BOUND | {"float32": 1e-4}
"""For kinds with keys that are nearly or exactly equal: a triangular solve amplifies rounding."""

DELTA_GRADIENT_BOUND = CORRELATED_BOUND | {"float16": 1e-2, "bfloat16": 5e-2}
"""The same, for the gradients of the delta rule: at most twice what its kernels' rounding makes."""

FLOAT16_NORMAL = 2.0**-14
"""The smallest normal number: below it the spacing does not shrink with the number."""


def smallest_measured(dtype: str) -> float:
    """The size below which errors are not relative."""
    return FLOAT16_NORMAL if dtype == "float16" else 0.0


def bound(dtype: str, kind: str, *, is_delta_gradient: bool = False) -> float:
    """The largest allowed error."""
    if kind == "random":
        return BOUND[dtype]
    return (DELTA_GRADIENT_BOUND if is_delta_gradient else CORRELATED_BOUND)[dtype]


def error(
    result: np.ndarray, expected: np.ndarray, terms: float = 0.0, smallest: float = 0.0
) -> float:
    """The relative error in norm or of the worst element, whichever is larger; NaN if any is NaN.

    Where −∞ is expected (the sum of weights of a row without keys, as a logarithm), only −∞ is
    right. If an element is a sum whose terms cancel, `terms` is their size (`cancellation.py`).
    Elements below `smallest` are measured as if all were that large.
    """
    if result.shape != expected.shape:
        raise AssertionError(f"shape {result.shape} found, {expected.shape} expected")
    is_right = (result == -np.inf) & (expected == -np.inf)
    result, expected = (np.where(is_right, 0.0, array) for array in (result, expected))
    difference = np.abs(result - expected)
    if not difference.size:
        return 0.0
    size = max(float(np.max(np.abs(expected))), terms, smallest)
    norm = max(float(np.sqrt(np.sum(expected**2))), terms, smallest * expected.size**0.5)
    if size == 0:
        return float(np.max(difference))
    return float(max(np.sqrt(np.sum(difference**2)) / norm, np.max(difference) / size))
