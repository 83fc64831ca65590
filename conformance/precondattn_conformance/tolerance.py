"""Error measures and bounds.

The oracle is computed in float64 on inputs rounded to the case's dtype, so the difference is the
error of the computation alone. It is measured over the whole array and at the worst element, each
relative to the size of the result.
"""

from __future__ import annotations

import numpy as np

BOUND = {"float64": 1e-10, "float32": 2e-5, "float16": 5e-3, "bfloat16": 2e-2}
CORRELATED_BOUND = BOUND | {"float32": 1e-4}
"""Bounds for ill-conditioned calls. With nearly or exactly equal keys, a triangular solve amplifies
rounding. With keys of any kind, so does the inverse of a whole matrix: in Nyström that of the
landmarks, which are means of many tokens and so nearly equal, and in Mesa that of fewer keys than
channels."""

DELTA_GRADIENT_BOUND = CORRELATED_BOUND | {"float16": 1e-2, "bfloat16": 5e-2}
"""Bounds for the gradients of the delta rule: at most twice the rounding error of its kernels."""

SMALLEST = {"float16": 2.0**-14, "float64": 2.0**-1022, "float32": 0.0, "bfloat16": 0.0}
"""The sizes below which errors are absolute: the smallest normal numbers, below which the spacing
no longer shrinks with the number, or 0."""


def bound(
    dtype: str, kind: str, *, is_delta_gradient: bool = False, inverts: bool = False
) -> float:
    """The largest allowed error."""
    if kind == "random" and not inverts:
        return BOUND[dtype]
    return (DELTA_GRADIENT_BOUND if is_delta_gradient else CORRELATED_BOUND)[dtype]


def error(
    result: np.ndarray,
    expected: np.ndarray,
    terms: float | np.ndarray = 0.0,
    smallest: float = 0.0,
) -> float:
    """The relative error in norm or of the worst element, whichever is larger; NaN if any is NaN.

    Where −∞ is expected (the log-sum of the weights of a row without keys), only −∞ is right. For
    sums whose terms cancel, `terms` is the size of the terms, for all elements or for each
    (`cancellation.py`). For elements below `smallest`, the error is relative to `smallest`.
    """
    if result.shape != expected.shape:
        raise AssertionError(f"shape {result.shape} found, {expected.shape} expected")
    is_right = (result == -np.inf) & (expected == -np.inf)
    result, expected = (np.where(is_right, 0.0, array) for array in (result, expected))
    with np.errstate(invalid="ignore"):  # ∞ − ∞
        difference = np.abs(result - expected)
    if not difference.size:
        return 0.0
    size = max(float(np.max(np.abs(expected))), float(np.max(terms)), smallest)
    if size == 0:
        return float(np.max(difference))
    with np.errstate(invalid="ignore"):  # ∞ / ∞
        difference, expected = difference / size, expected / size  # Their squares may underflow.
    length = float(np.linalg.vector_norm(expected))
    length_of_terms = float(np.linalg.vector_norm(terms)) / size
    norm = max(length, length_of_terms, smallest / size * expected.size**0.5)
    return float(max(np.linalg.vector_norm(difference) / norm, np.max(difference)))
