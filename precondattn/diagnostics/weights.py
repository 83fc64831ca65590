"""The weights W of a mechanism: its output as a matrix times the values, o = W v.

    softmax: A        lucid: A P, P = E⁻¹        differential: A₁ − λ A₂
    linear: s tril(q kᵀ)        ccq(linear): s tril(qᶜ kᵀ), with the contracted query qᶜ

Where the output is linear in the values, W is the output for v = I, for any composition. Whether it
is linear is not looked up but tried: for random values, f(v) has to equal W v. LASER, which takes a
logarithm of what it reads, has no such matrix, nor has the row norm.
"""

from __future__ import annotations

import math
from math import prod
from typing import Any

import numpy as np

from precondattn.algebra.mechanism import Mechanism
from precondattn.arrays import Array, dtype_name, namespace, on_device_of, stop_gradient
from precondattn.diagnostics.arguments import examined_inputs
from precondattn.spec.array_functions import swap_time_and_heads


def weights(mechanism: Mechanism, *arrays: Array, **named: Any) -> Array:
    """The matrix W of every sequence and head with o = W v: what each query reads of each value.

    Parameters
    ----------
    mechanism : Mechanism
        Any whose output is linear in its values, and whose values are of tokens: `pa.Lucid()`,
        `pa.parse("ccq(gated_delta)")`, a piece such as `pa.LucidSolve()`.
    *arrays, **named
        The arguments of its call, also masks and `backend`. Of the values v only the shape, the
        dtype and the device matter.

    Returns
    -------
    array (b, h, t, s)
        In float32 for inputs in half precision. Entries may be negative, and rows need not sum to
        1. Columns of masked keys are 0. For several values a token, as in `delta_product`, the
        last axis has those of the first token, then those of the second, and so on. It is computed
        as an output of s channels, in memory proportional to t s, or as several of v's own width
        where that matters. PyTorch can differentiate it.

    Raises
    ------
    TypeError
        where the output is no matrix times the values, with the reason; for a mechanism without
        values, for traced arrays, and for arguments that the call refuses.
    ValueError
        for arguments that the call refuses.

    Examples
    --------
    Two equal keys and another one. LUCID reads the later of the equal ones:

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

    def read(values: np.ndarray) -> Array:
        """The output (b, h, t, e) for other values."""
        given = on_device_of(v, np.ascontiguousarray(values.astype(dtype_name(v))))
        return swap_time_and_heads(mechanism(**{**inputs, "v": given}, **options))

    if v.ndim < 4:
        mechanism(**inputs, **options)  # It raises the error of its shape.
    tokens, heads, channels = tuple(v.shape[1:-2]), v.shape[-2], v.shape[-1]
    count = prod(tokens)
    tried = np.random.default_rng(0).normal(size=v.shape)
    out = read(tried)
    by_head = np.moveaxis(tried.reshape(v.shape[0], count, heads, channels), 2, 1)
    by_head = np.repeat(by_head, out.shape[1] // heads, axis=1).astype(dtype_name(v))
    by_head = on_device_of(v, by_head)
    error = 0.0
    # A mechanism may depend on the width of its values, as by a scale.
    for width in dict.fromkeys((max(count, 1), channels)):
        columns = []
        for start in range(0, max(count, 1), width):
            one = np.eye(count, width, -start).reshape(1, *tokens, 1, width)
            columns.append(read(np.broadcast_to(one, (*v.shape[:-1], width))))
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
    """Raise a TypeError unless there are values of tokens, with channels that nothing else has."""
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
    """How far an output is from the weights times its values, by head: a share of the largest."""
    matrix, out = stop_gradient(matrix), stop_gradient(out)
    if 0 in out.shape:
        return 0.0
    xp = namespace(matrix)
    gap, size = xp.abs(out - matrix @ v), xp.abs(matrix) @ xp.abs(v)
    # Rows that are NaN, because of the inputs, say nothing of the mechanism.
    gap, size = (xp.max(xp.where(xp.isfinite(gap), x, 0.0)) for x in (gap, size))
    return float(gap / xp.where(size > 0, size, 1.0))
