"""Error measures and bounds.

The oracle is computed in float64 on inputs rounded to the case's dtype, so the difference is the
error of the computation alone. It is measured over the whole array and at the worst element, each
relative to the size of the result.
"""

from __future__ import annotations

import numpy as np

BOUND = {"float64": 1e-10, "float32": 2e-5, "float16": 5e-3, "bfloat16": 2e-2}
CORRELATED_BOUND = BOUND | {"float32": 1e-4}
"""For keys that are nearly or exactly equal: a triangular solve amplifies rounding. For keys of any
kind where a whole matrix is inverted: that of Nyström's landmarks, which are means of many tokens
and so nearly equal, and Mesa's, of fewer keys than channels."""

DELTA_GRADIENT_BOUND = CORRELATED_BOUND | {"float16": 1e-2, "bfloat16": 5e-2}
"""The same, for the gradients of the delta rule: at most twice what its kernels' rounding makes."""

SMALLEST = {"float16": 2.0**-14, "float64": 2.0**-1022}
"""The smallest normal number: below it the spacing does not shrink with the number."""


def smallest_measured(dtype: str) -> float:
    """The size below which errors are not relative."""
    return SMALLEST.get(dtype, 0.0)


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

    Where −∞ is expected (the sum of weights of a row without keys, as a logarithm), only −∞ is
    right. If an element is a sum whose terms cancel, `terms` is their size, or the size of those of
    each element (`cancellation.py`).
    Elements below `smallest` are measured as if all were that large.
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
