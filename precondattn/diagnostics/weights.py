"""The weights of a mechanism: the matrix W with output o = W v.

    softmax: A        lucid: A P, P = E⁻¹        differential: A₁ − λ A₂
    linear: s tril(q kᵀ)        ccq(linear): s tril(qᶜ kᵀ), with the contracted query qᶜ

If the output is linear in the values, W is the output for v = I, for any composition. Whether it is
linear is tested: for random values, f(v) must equal W v. LASER, whose output is a logarithm of a
mean, has no such matrix, and neither has the row norm.
"""

from __future__ import annotations

import math
from math import prod
from typing import Any

import numpy as np

from precondattn.algebra.mechanism import Mechanism
from precondattn.arrays import Array, dtype_name, namespace, on_device_of, stop_gradient
from precondattn.diagnostics.checks import examined_inputs
from precondattn.spec.array_functions import swap_time_and_heads


def weights(mechanism: Mechanism, *arrays: Array, **named: Any) -> Array:
    """The matrix W with o = W v for every sequence and head: the weight of each value per query.

    Parameters
    ----------
    mechanism : Mechanism
        A mechanism whose output is linear in its values, and whose values belong to tokens:
        `pa.Lucid()`, `pa.parse("ccq(gated_delta)")`, or a piece such as `pa.LucidSolve()`.
    *arrays, **named
        The arguments of its call, including masks and `backend`. Only shape, dtype and device of v
        matter.

    Returns
    -------
    array (b, h, t, s)
        W, in float32 for inputs in half precision. Entries may be negative, and rows need not sum
        to 1. Columns of masked keys are 0. If a token has several values, as in `delta_product`,
        the last axis has the values of the first token, then those of the second, and so on. W is
        computed as an output with s channels, in memory proportional to t s, or, if the mechanism
        depends on the width of v, as several outputs of that width. PyTorch can differentiate it.

    Raises
    ------
    TypeError
        if the output is not linear in the values, with the reason; for a mechanism without values,
        for traced arrays, and for arguments that the call refuses.
    ValueError
        for arguments that the call refuses.

    Examples
    --------
    Two equal keys and a different one. LUCID reads only the later of the equal ones:

    >>> import numpy as np, precondattn as pa
    >>> k = np.asarray([[4.0, 0], [4, 0], [0, 4]]).reshape(1, 3, 1, 2)
    >>> pa.diagnostics.weights(pa.Softmax(), k, k, k)[0, 0, 1:].round(2)
    array([[0.5, 0.5, 0. ],
           [0. , 0. , 1. ]])
    >>> pa.diagnostics.weights(pa.Lucid(), k, k, k)[0, 0, 1].round(2)
    array([0. , 0.5, 0. ])
    """
    inputs, options = examined_inputs("weights", mechanism, arrays, named)
    _check_values(mechanism)
    v = inputs["v"]

    def output_of(values: np.ndarray) -> Array:
        """The output (b, h, t, e) for other values."""
        values_like_v = on_device_of(v, np.ascontiguousarray(values.astype(dtype_name(v))))
        return swap_time_and_heads(mechanism(**{**inputs, "v": values_like_v}, **options))

    if v.ndim < 4:
        mechanism(**inputs, **options)  # This raises the error for the shape.
    tokens, heads, channels = tuple(v.shape[1:-2]), v.shape[-2], v.shape[-1]
    count = prod(tokens)
    tried = np.random.default_rng(0).normal(size=v.shape)
    out = output_of(tried)
    by_head = np.moveaxis(tried.reshape(v.shape[0], count, heads, channels), 2, 1)
    by_head = np.repeat(by_head, out.shape[1] // heads, axis=1).astype(dtype_name(v))
    by_head = on_device_of(v, by_head)
    error = 0.0
    # A mechanism may depend on the width of its values, for example by a scale.
    for width in dict.fromkeys((max(count, 1), channels)):
        columns = []
        for start in range(0, max(count, 1), width):
            one = np.eye(count, width, -start).reshape(1, *tokens, 1, width)
            columns.append(output_of(np.broadcast_to(one, (*v.shape[:-1], width))))
        matrix = namespace(out).concat(columns, axis=-1)[..., :count]
        error = _error(matrix, by_head, out)
        if error <= math.sqrt(namespace(out).finfo(out.dtype).eps):
            return matrix
    raise TypeError(
        f"{mechanism}: its output is no matrix times its values: of random ones it is off by "
        f"{error:.1g} of the largest term. A logarithm or a norm of what is read has no weights; "
        f"ask for those of the mechanism without it"
    )


def _check_values(mechanism: Mechanism) -> None:
    """Raise a TypeError unless v has tokens, and channels that no other input has."""
    if "v" not in mechanism.inputs:
        raise TypeError(f"{mechanism} reads no values v, and has no weights")
    declared = mechanism.inputs["v"]
    if declared.letters[-1] != "e":
        raise TypeError(
            f"{mechanism} has weights of channels and not of tokens: v is declared ({declared})"
        )
    others = [name for name, of in mechanism.inputs.items() if name != "v" and "e" in of.letters]
    if others:
        raise TypeError(
            f"{mechanism} has other weights for every channel of v, by {', '.join(others)}, and no "
            f"matrix for all"
        )


def _error(matrix: Array, v: Array, out: Array) -> float:
    """The largest difference of an output from W v, relative to the largest entry of its head."""
    matrix, out = stop_gradient(matrix), stop_gradient(out)
    if 0 in out.shape:
        return 0.0
    xp = namespace(matrix)
    gap, size = xp.abs(out - matrix @ v), xp.abs(matrix) @ xp.abs(v)
    # Rows with NaN, caused by the inputs, say nothing about the mechanism.
    gap, size = (xp.max(xp.where(xp.isfinite(gap), x, 0.0)) for x in (gap, size))
    return float(gap / xp.where(size > 0, size, 1.0))
