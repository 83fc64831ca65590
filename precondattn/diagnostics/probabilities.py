"""The histogram of attention probabilities by powers of ten, which shows how many are small.

The gradient of a score is at most its probability times a distance of values, so scores with small
probabilities hardly learn. In a language model with 2.2 billion parameters, LASER's paper finds 80
% of the probabilities below 10⁻³, and 20 % below 10⁻⁷ (arXiv 2411.03493, Figure 1 and §3).
"""

from __future__ import annotations

from collections.abc import Sequence

from precondattn.arrays import (
    Array,
    arange_like,
    cast,
    dtype_name,
    is_finite_number,
    is_traced,
    library_of,
    namespace,
    upcast,
)
from precondattn.diagnostics.checks import check_floating

DECADES = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


def probability_histogram(
    probabilities: Array, edges: Sequence[float] = DECADES, visible: Array | None = None
) -> Array:
    """The shares of each head's probabilities below the first edge, between edges, and above.

    Parameters
    ----------
    probabilities : array (…, t, s)
        Attention probabilities, such as the result of `weights` for softmax attention. A
        probability that underflowed to 0 counts as below the first edge.
    edges : sequence of float
        Positive numbers in ascending order; powers of ten from 10⁻⁷ to 10⁻¹ by default.
    visible : boolean array, optional
        Which pairs of a query and a key are counted; it must broadcast to the shape of the
        probabilities. By default the pairs of causal attention in which the last query has the
        position of the last key.

    Returns
    -------
    array (…, number of edges + 1)
        The shares, which sum to 1: below the first edge, from each edge to below the next, and from
        the last edge on. Their cumulative sums are the shares below each edge. NaN if no pair is
        visible.

    Raises
    ------
    TypeError, ValueError
        if the probabilities are not a floating-point array with at least two axes, if a visible one
        is negative (as LUCID's weights may be), or if edges or `visible` are not as described.

    Source
    ------
    LASER (arXiv 2411.03493), Figure 1.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 64, 1, 16))
    >>> for sharp in (1, 8):
    ...     a = pa.diagnostics.weights(pa.Softmax(), sharp * q, k, v)
    ...     below = np.cumsum(pa.diagnostics.probability_histogram(a), axis=-1)
    ...     print(below[0, 0, [0, 4]].round(2))  # below 1e-7 and below 1e-3
    [0.   0.01]
    [0.5  0.87]
    """
    check_floating("probabilities", probabilities, "(..., t, s)")
    edges = _checked(edges)
    p, xp = upcast(probabilities), namespace(probabilities)
    if visible is None:
        t, s = p.shape[-2:]
        visible = arange_like(s, p) <= arange_like(t, p)[:, None] + (s - t)
    else:
        _check_visible(visible, p)
    if not is_traced(p) and bool(xp.any(visible & (p < 0))):
        raise ValueError("probabilities must be at least 0 where they are visible")

    def count(chosen: Array) -> Array:
        of = xp.astype(xp.broadcast_to(chosen, p.shape), xp.int32)
        return xp.sum(of, axis=(-2, -1))

    below = [count(visible & (p < edge)) for edge in edges]
    total = count(visible)
    counts = [below[0], *(b - a for a, b in zip(below, [*below[1:], total], strict=True))]
    divisor = cast(xp.where(total > 0, total, 1), p.dtype)[..., None]
    shares = cast(xp.stack(counts, axis=-1), p.dtype) / divisor
    return xp.where((total > 0)[..., None], shares, float("nan"))


def _checked(edges: Sequence[float]) -> tuple[float, ...]:
    """The edges, after a check that they are positive and ascending."""
    edges = tuple(edges)
    are_numbers = edges and all(is_finite_number(edge) for edge in edges)
    if not are_numbers or edges[0] <= 0 or list(edges) != sorted(set(edges)):
        raise ValueError(f"edges must be positive numbers that ascend; found {edges!r}")
    return edges


def _check_visible(visible: Array, p: Array) -> None:
    if library_of(visible) != library_of(p) or dtype_name(visible) != "bool":
        raise TypeError(
            f"visible must be a boolean array of {library_of(p)}; found {type(visible).__name__}"
        )
    shape = tuple(visible.shape)
    axes = zip(shape[::-1], p.shape[::-1], strict=False)
    if len(shape) > p.ndim or any(size not in (1, of) for size, of in axes):
        raise ValueError(
            f"visible must broadcast to the shape {tuple(p.shape)} of the probabilities; found "
            f"shape {shape}"
        )
