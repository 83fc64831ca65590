"""Functions that the kernels of a chunkwise recurrence share: decay factors, and sums.

    D_ij = e^{g_{j+1} + … + g_i}  (j ≤ i),    reading_i = e^{g_1 + … + g_i},
    writing_j = e^{g_{j+1} + … + g_C},        total = e^{g_1 + … + g_C}.

Every exponent is the sum of its own gates and never a difference of sums, so a strong gate costs
the weak gates after it no accuracy. A gate of −∞ is replaced by −200, whose exponential is 0 in
float32.

Kernels have arrays (m, T, w) in memory, with m the heads of all sequences that have a state, T the
tokens padded to whole chunks, and w a width padded to whole tiles. Padding has k = 0, v = 0, q = 0,
β = 0 and g = 0. With r queries per state, queries are (m, r, T, d). A factor that is missing among
a kernel's inputs is 1.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from precondattn.arrays import Array
from precondattn_pallas.launch import References, loop
from precondattn_pallas.precision import Products


def every_block(
    width: int, block: int, add: Callable[[Array, Array], Array], total: Array
) -> Array:
    """Sum `add(columns, total)` over blocks of columns."""
    if width <= block:
        return add(pl.ds(0, width), total)

    def one(index: Array, total: Array) -> Array:
        return add(pl.ds(pl.multiple_of(index * block, block), block), total)

    return loop(0, width // block, one, total)


def products_of_rows(products: Products, a: Array, b: Array, block: int, *row: int) -> Array:
    """a bᵀ of references to rows, a block of channels at a time; `row` indexes a."""
    (rows, width), columns = a.shape[len(row) :], b.shape[0]

    def add(c: Array, total: Array) -> Array:
        return total + products.dot(a[(*row, slice(None), c)], b[:, c], right=True)

    return every_block(width, block, add, jnp.zeros((rows, columns), jnp.float32))


def tokens_of(size: int) -> tuple[Array, Array]:
    """The token i of every row, and j of every column."""
    i = lax.broadcasted_iota(jnp.int32, (size, size), 0)
    return i, lax.broadcasted_iota(jnp.int32, (size, size), 1)


def pairs_of(x: References, size: int, *, strict: bool = False) -> Array:
    """D, 0 above the diagonal, or, if `strict`, above and on it.

    With `preceding`, the gates of the tokens before, token i reads before its own gate:
    D_ij = e^{g_{j+1} + … + g_{i−1}}.
    """
    i, j = tokens_of(size)
    seen = i > j if strict else i >= j
    if "g" not in x:
        return jnp.where(seen, jnp.float32(1), jnp.float32(0))
    # Column j accumulates the gates of the tokens after j.
    if "preceding" in x:
        after = jnp.where(i > j + 1, x["preceding"][...][:, None], jnp.float32(0))
    else:
        after = jnp.where(i > j, x["g"][...][:, None], jnp.float32(0))
    return jnp.where(seen, jnp.exp(jnp.cumsum(after, axis=0)), jnp.float32(0))


def crossing(pairs: Array, *, undecayed: bool = False) -> Array:
    """The gates' gradient from Σ dx ∘ x over pairs (C, C): gate t is in the pairs j < t ≤ i, or
    j < t < i if `undecayed`."""
    i, j = tokens_of(pairs.shape[0])
    before = jnp.cumsum(pairs, axis=1) - pairs
    return jnp.sum(jnp.where(i > j if undecayed else i >= j, before, jnp.float32(0)), axis=0)


def scores_of(products: Products, x: References, block: int, *row: int) -> Array:
    """D ∘ Q Kᵀ, of the queries at `row`."""
    if "scores" in x:
        return x["scores"][(*row, slice(None), slice(None))]
    result = products_of_rows(products, x["q"], x["k"], block, *row)
    return result * pairs_of(x, result.shape[0])


def is_by_channel(x: Array, factor: str) -> bool:
    return len(x[factor].shape) == 2


def decayed(x: References, name: str, factor: str, *where: Array) -> Array:
    """Rows of an input times the factor of their token, or of each of their channels; the last
    index is that of the columns."""
    rows = x[name][where]
    if factor not in x:
        return rows
    if is_by_channel(x, factor):
        return rows * x[factor][where[-2:]]
    return rows * x[factor][where[-2] if len(where) > 1 else ...][:, None]
