"""Functions that the oracle needs and the array-API standard lacks.

Inside the oracle, heads come before time, `(b, h, t, d)`, so that a matrix product over the last
two axes is the product of one attention head.
"""

from __future__ import annotations

import math

from precondattn.arrays import (
    arange_like,
    as_index,
    cast,
    is_ordinary,
    namespace,
    nonempty,
    solve_triangular,
    stop_gradient,
    zero_where_not,
)
from precondattn.frame import Frame
from precondattn.frameworks.types import Array, Arrays


def transpose(x: Array) -> Array:
    """The array with its last two axes swapped."""
    return namespace(x).matrix_transpose(x)


_SWAPPED = tuple((0, 2, 1, *range(3, rank)) for rank in range(9))


def swap_time_and_heads(x: Array) -> Array:
    """The array (b, t, h, …) as (b, h, t, …), or the reverse."""
    return namespace(x).permute_dims(x, _SWAPPED[x.ndim])


def next_token(x: Array) -> Array:
    """x_{t+1} along axis 2, and 0 for the last token: the transpose of `previous_token`."""
    return moved(x, 1, axis=2)


def previous_token(x: Array) -> Array:
    """x_{t−1} along axis 2, and 0 for the first token."""
    return moved(x, -1, axis=2)


def moved(x: Array, step: int, axis: int) -> Array:
    """x_{i + step} in place of x_i along an axis, and 0, or False, where there is none."""
    xp, before = namespace(x), (slice(None),) * axis
    size = x.shape[axis]
    if is_ordinary(x):  # A program with slices could not take a single token too.
        i = arange_like(size, x) + step
        exists = xp.reshape((i >= 0) & (i < size), (-1, *(1,) * (x.ndim - 1 - axis)))
        found = xp.take(x, as_index(xp.clip(i, 0, size - 1)), axis=axis)
        if x.dtype == xp.bool:  # onnxruntime has no `where` for it.
            return exists & found
        return xp.where(exists, found, xp.zeros_like(x))
    if abs(step) >= size:
        return xp.zeros_like(x)
    if not step:
        return x
    kept = x[(*before, slice(max(step, 0), size + min(step, 0)), ...)]
    filled = xp.zeros_like(x[(*before, slice(abs(step)), ...)])
    return xp.concat([kept, filled] if step > 0 else [filled, kept], axis=axis)


def after_zeros(x: Array, s: int) -> Array:
    """x (b, h, t, …) of the last t of s tokens, after zeros for the other tokens."""
    missing = s - x.shape[2]
    if not missing:
        return x
    xp, (b, h, _, *rest) = namespace(x), x.shape
    zeros = xp.broadcast_to(xp.zeros_like(x[:, :, :1, ...]), (b, h, missing, *rest))
    return xp.concat([zeros, x], axis=2)


def repeat_heads(x: Array, heads: int) -> Array:
    """x (b, n, …) repeated to (b, heads, …): query head i gets key/value head ⌊i n / heads⌋."""
    xp, group = namespace(x), heads // x.shape[1]
    if group == 1 or not is_ordinary(x):
        return x if group == 1 else xp.repeat(x, group, axis=1)
    b, n, *rest = x.shape  # PyTorch's repetition in ONNX does not know the heads of no tokens.
    each = xp.broadcast_to(x[:, :, None, ...], (b, n, group, *rest))
    return xp.reshape(each, (b, heads, *rest))


def sum_heads(x: Array, heads: int) -> Array:
    """x (b, h, …) summed over groups to (b, heads, …): the transpose of `repeat_heads`."""
    if x.shape[1] == heads:
        return x
    xp = namespace(x)
    each = (x.shape[0], heads, x.shape[1] // heads, *x.shape[2:])
    return xp.sum(xp.reshape(x, each), axis=2)


def sum_to(x: Array, shape: tuple[int, ...]) -> Array:
    """The sum over the axes along which `shape` was broadcast to x."""
    xp = namespace(x)
    for axis, (wide, narrow) in enumerate(zip(x.shape, shape, strict=True)):
        if wide != narrow:
            x = xp.sum(x, axis=axis, keepdims=True)
    return x


def row_sum(x: Array) -> Array:
    """The sum along the last axis, which becomes an axis of size 1."""
    return namespace(x).sum(x, axis=-1, keepdims=True)


def sum_rows(x: Array) -> Array:
    """The sum over every axis but the last."""
    return namespace(x).sum(x, axis=tuple(range(x.ndim - 1)))


def identity_like(x: Array) -> Array:
    """The identity matrix of x's last axis, with an axis of size 1 for every earlier axis of x."""
    # Not `eye`, which PyTorch can not export to ONNX for a symbolic size.
    row = arange_like(x.shape[-1], x)
    one = cast(row[:, None] == row[None, :], x.dtype)
    return one[(*(None,) * (x.ndim - 2), ...)]


def solve_upper(matrix: Array, right: Array) -> Array:
    """The solution matrix⁻¹ right for upper-triangular matrices (…, s, s) and right (…, s, e)."""
    return _solve(matrix, right, lower=False)


def solve_lower(matrix: Array, right: Array) -> Array:
    """The solution matrix⁻¹ right for lower-triangular matrices (…, s, s) and right (…, s, e)."""
    return _solve(matrix, right, lower=True)


def _solve(matrix: Array, right: Array, *, lower: bool) -> Array:
    """The solution of triangular systems by the library's triangular solver, or by substitution.

    The standard's general solver is not used: it raises an error if a diagonal entry underflows to
    0, its pivots may be entries of later tokens, and an infinity would spread to earlier ones.
    """
    xp = namespace(matrix, right)
    batch = tuple(
        max(m, r) for m, r in zip(matrix.shape[:-2], right.shape[:-2], strict=True)
    )  # Not every library broadcasts the batch axes.
    matrix = xp.broadcast_to(matrix, batch + matrix.shape[-2:])
    right = xp.broadcast_to(right, batch + right.shape[-2:])
    solution = solve_triangular(matrix, right, lower=lower)
    return _substitute(matrix, right, lower=lower) if solution is None else solution


def _substitute(matrix: Array, right: Array, *, lower: bool) -> Array:
    """The solution of half of the rows, then of the other half after subtracting their product."""
    xp = namespace(matrix, right)
    size = matrix.shape[-1]
    if size == 1:
        return right / matrix
    top, bottom = slice(size // 2), slice(size // 2, None)
    first, second = (top, bottom) if lower else (bottom, top)
    solved = _substitute(matrix[..., first, first], right[..., first, :], lower=lower)
    rest = right[..., second, :] - matrix[..., second, first] @ solved
    others = _substitute(matrix[..., second, second], rest, lower=lower)
    return xp.concat([solved, others] if lower else [others, solved], axis=-2)


def where_valid(x: Array, frame: Frame) -> Array:
    """x (b, heads, s, …) with 0 at padding and at masked keys."""
    valid = frame.valid_keys(x.shape[2])
    if valid is None:
        return x
    shape = (valid.shape[0], 1, valid.shape[1], *(1,) * (x.ndim - 3))
    return zero_where_not(namespace(valid).reshape(valid, shape), x)


def finite_or_zero(x: Array) -> Array:
    """x with 0 in place of −∞, which is the shift of a row whose entries are all masked."""
    return namespace(x).where(x == -math.inf, 0.0, x)


def log_sum_exp(x: Array, axis: int) -> Array:
    """log Σ eˣ along an axis, which becomes an axis of size 1; −∞ where every x is −∞.

    Neither the result nor its derivative is NaN there. It is NaN where an x is.
    """
    xp = namespace(x)
    shift = finite_or_zero(xp.max(nonempty(x, axis), axis=axis, keepdims=True))
    total = xp.sum(xp.exp(x - shift), axis=axis, keepdims=True)
    is_some = total != 0
    return xp.where(is_some, shift + xp.log(xp.where(is_some, total, 1.0)), -math.inf)


def log_softmax(x: Array, more: Array | None = None) -> tuple[Array, Array]:
    """x − λ and λ = log Σ eˣ along the last axis, which becomes an axis of size 1.

    Both are −∞ where every x is −∞. `more` is one more entry of each row that λ includes. The
    maximum is subtracted first; weights do not depend on it, so it is constant for the gradient.
    """
    xp = namespace(x)
    largest = xp.max(nonempty(x, -1), axis=-1, keepdims=True)
    if more is not None:
        largest = xp.maximum(largest, more)
    shift = stop_gradient(finite_or_zero(largest))
    shifted = x - shift
    total = row_sum(xp.exp(shifted))
    if more is not None:
        total = total + xp.exp(more - shift)
    is_nonzero = total != 0
    log_total = xp.log(xp.where(is_nonzero, total, 1.0))
    return shifted - log_total, xp.where(is_nonzero, shift + log_total, -math.inf)


def softmax(x: Array) -> Array:
    """eˣ / Σ eˣ along the last axis; 0 where every x is −∞."""
    return namespace(x).exp(log_softmax(x)[0])


def input_gradients(d_q: Array, d_k: Array, d_v: Array, heads: int) -> Arrays:
    """The gradients of q, k and v, from those with a key and a value for each query head."""
    of_heads = {"q": d_q, "k": sum_heads(d_k, heads), "v": sum_heads(d_v, heads)}
    return {name: swap_time_and_heads(gradient) for name, gradient in of_heads.items()}


def softmax_vjp(weights: Array, d_weights: Array) -> Array:
    """The gradient of the x of `softmax`, A ∘ (dA − rowsum(dA ∘ A))."""
    return weights * (d_weights - row_sum(d_weights * weights))


def mask_scores(visible: Array, scores: Array) -> Array:
    """The scores with −∞ at masked pairs; exponents are always masked before `exp`."""
    return namespace(scores).where(visible, scores, -math.inf)
