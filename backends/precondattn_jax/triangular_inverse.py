"""Inverses of many small triangular matrices, as in `precondattn_portable`.

    [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [−B⁻¹ C A⁻¹, B⁻¹]]

from blocks of a few rows to the whole matrix, all blocks of a level at once; the smallest blocks
are inverted row by row. The derivative of M = (I + L)⁻¹ is dM = −M dL M.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from precondattn.spec.array_functions import identity_like
from precondattn_jax.arithmetic import product, zeros

LEAF = 16
"""Rows of the blocks that are inverted row by row."""


@jax.custom_jvp
def unit_lower_inverse(strict: Array) -> Array:
    """(I + strict)⁻¹ for strictly lower triangular matrices (…, C, C)."""
    size = strict.shape[-1]
    leaf = min(LEAF, size)
    levels = math.ceil(math.log2(size / leaf))
    whole = leaf << levels
    flat = jnp.reshape(strict, (-1, size, size))
    flat = jnp.pad(flat, ((0, 0), (0, whole - size), (0, whole - size)))
    inverse = _row_by_row(_blocks(flat, leaf, 0, 0, 1))
    width = leaf
    while width < whole:
        first, second = inverse[0::2], inverse[1::2]
        below = -product(second, product(_blocks(flat, width, 1, 0, 2), first))
        rows = jnp.pad(first, ((0, 0),) * 3 + ((0, width),)), jnp.concatenate([below, second], -1)
        inverse = jnp.concatenate(rows, axis=-2)
        width *= 2
    return jnp.reshape(inverse[0, :, :size, :size], strict.shape)


@unit_lower_inverse.defjvp
def _derivative(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(*primals)
    strict = jnp.tril(tangents[0], k=-1)
    return inverse, -product(inverse, product(strict, inverse))


def _blocks(flat: Array, width: int, row: int, column: int, step: int) -> Array:
    """Every `step`-th block on a diagonal of (m, C, C): (count, m, width, width)."""
    count = flat.shape[-1] // width
    blocks = jnp.reshape(flat, (-1, count, width, count, width))
    index = jnp.arange(0, count, step, dtype="int32")
    return blocks[:, index + row, :, index + column, :]


def _row_by_row(strict: Array) -> Array:
    """The inverses of small blocks (count, m, w, w): row i is eᵢ − Σ_{j<i} L_ij (row j)."""
    size = strict.shape[-1]
    identity = identity_like(strict)
    result = zeros(strict.shape, strict) + identity

    def with_row(i: Array, result: Array) -> Array:
        row, identity_row = (lax.dynamic_slice_in_dim(a, i, 1, axis=-2) for a in (strict, identity))
        inverse_row = jnp.sum(jnp.matrix_transpose(row) * result, axis=-2, keepdims=True)
        return lax.dynamic_update_slice_in_dim(result, identity_row - inverse_row, i, axis=-2)

    return lax.fori_loop(1, size, with_row, result) if size > 1 else result
