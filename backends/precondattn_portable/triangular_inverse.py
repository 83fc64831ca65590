"""Inverses of many small triangular matrices, mostly by products.

    [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]],

from blocks of a few rows to the whole matrix; the smallest blocks are inverted row by row, a stack
at a time. This is as stable as substitution row by row (Higham 2002, 14.2). Doubling the Neumann
series, (I − L)(I + L²)(I + L⁴)…, is not: for nearly equal keys its factors are as large as 2^C and
cancel.
"""

from __future__ import annotations

from precondattn.arrays import Array
from precondattn.spec.array_functions import identity_like
from precondattn_portable.arithmetic import Arithmetic

LEAF = 8
"""Rows of the blocks that are inverted row by row; smaller ones cost more calls than work."""


def unit_lower_inverse(ops: Arithmetic, strict: Array, out: Array | None = None) -> Array:
    """(I + strict)⁻¹ for strictly lower triangular matrices (…, C, C), in `out` where given."""
    xp = ops.namespace(strict)
    size = strict.shape[-1]
    if ops.sizes.few_operations:
        solved = ops.solve_unit_lower(strict, identity_like(strict))
        if solved is not None:
            return solved
    flat = ops.reshape(strict, (-1, size, size))
    whole = size - size % LEAF
    if out is None:
        inverse = ops.zeros(flat.shape, flat)
    else:
        inverse = xp.reshape(out, flat.shape)
        inverse[...] = 0.0
    for rows, start in ((LEAF, 0), (size - whole, whole)):
        count = whole // LEAF if rows == LEAF else 1
        if not rows or start + rows > size:
            continue
        ranges = [slice(start + rows * i, start + rows * (i + 1)) for i in range(count)]
        blocks = _row_by_row(ops, xp.stack([flat[:, at, at] for at in ranges]))
        for i, at in enumerate(ranges):
            inverse[:, at, at] = blocks[i, ...]
    width = LEAF
    while width < size:
        for start in range(0, size - width, 2 * width):
            first = slice(start, start + width)
            second = slice(start + width, min(start + 2 * width, size))
            below = ops.product(flat[:, second, first], inverse[:, first, first])
            below = ops.product(inverse[:, second, second], below)
            inverse[:, second, first] = ops.multiply(below, -1.0)
        width *= 2
    return xp.reshape(inverse, strict.shape)


def _row_by_row(ops: Arithmetic, strict: Array) -> Array:
    """The inverses of a stack of small blocks (n, m, w, w).

    The stack becomes the last axis, along which libraries access memory contiguously.
    """
    xp = ops.namespace(strict)
    size = strict.shape[-1]
    strict = ops.multiply(xp.permute_dims(strict, (2, 3, 0, 1)) + 0.0, -1.0)
    inverse = ops.zeros(strict.shape, strict)
    for i in range(1, size):
        # Row i of X = I − strict X, without its diagonal.
        inverse[i, :i, ...] = strict[i, :i, ...]
        if i > 1:
            inverse[i, :i, ...] += xp.sum(strict[i, 1:i, None, ...] * inverse[1:i, :i, ...], axis=0)
    row = ops.arange(size, strict)
    identity = xp.astype(row[:, None] == row, strict.dtype)
    inverse = ops.add(inverse, identity[..., None, None])
    return xp.permute_dims(inverse, (2, 3, 0, 1))


def solve_unit_lower(
    ops: Arithmetic, strict: Array, right: Array, *, transposed: bool = False
) -> Array:
    """(I + strict)⁻¹ right for strictly lower triangular matrices (…, C, C).

    With the transposed matrices, it is (I + strict)⁻ᵀ right.
    """
    solved = ops.solve_unit_lower(strict, right, transposed=transposed)
    if solved is not None:
        return solved
    inverse = unit_lower_inverse(ops, strict)
    return ops.product(ops.transposed(inverse) if transposed else inverse, right)
