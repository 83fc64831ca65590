"""What the kernels of a recurrence in chunks have in common: how its tokens fade, and sums.

    D_ij = e^{g_{j+1} + … + g_i}  (j ≤ i),    reading_i = e^{g_1 + … + g_i},
    writing_j = e^{g_{j+1} + … + g_C},        total = e^{g_1 + … + g_C}.

Every exponent is the sum of the gates it consists of, and none is a difference of sums: a strong
gate costs the weak ones behind it no digits. A gate of −∞ comes as one of −200, of which float32's
exponential is 0 as well.

Kernels have arrays (m, T, w) in memory, with m the heads of all sequences that have a state, T the
tokens filled up to whole chunks, and w a width filled up to whole tiles. Tokens that fill up have
k = 0, v = 0, q = 0, β = 0 and g = 0. With r queries to a state, queries are (m, r, T, d). Where one
factor of a name is missing among a kernel's inputs, it is 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from precondattn_pallas.launch import loop
from precondattn_pallas.precision import Products


def every_block(width: int, block: int, add: Callable[[Any, Any], Any], total: Any) -> Any:
    """`add(columns, total)` for one block of columns after the other."""
    if width <= block:
        return add(pl.ds(0, width), total)

    def one(index: Any, total: Any) -> Any:
        return add(pl.ds(pl.multiple_of(index * block, block), block), total)

    return loop(0, width // block, one, total)


def products_of_rows(products: Products, a: Any, b: Any, block: int, *row: int) -> Any:
    """a bᵀ of references to rows, a block of channels at a time; of a, those at `row`."""
    (rows, width), columns = a.shape[len(row) :], b.shape[0]

    def add(c: Any, total: Any) -> Any:
        return total + products.dot(a[(*row, slice(None), c)], b[:, c], right=True)

    return every_block(width, block, add, jnp.zeros((rows, columns), jnp.float32))


def tokens_of(size: int) -> tuple[Any, Any]:
    """The token i of every row, and j of every column."""
    i = lax.broadcasted_iota(jnp.int32, (size, size), 0)
    return i, lax.broadcasted_iota(jnp.int32, (size, size), 1)


def pairs_of(x: Any, size: int, *, strict: bool = False) -> Any:
    """D, with 0 above the diagonal, or, strictly, above and on it."""
    i, j = tokens_of(size)
    seen = i > j if strict else i >= j
    if "g" not in x:
        return jnp.where(seen, jnp.float32(1), jnp.float32(0))
    # Down the column of token j the gates behind it add up.
    behind = jnp.where(i > j, x["g"][...][:, None], jnp.float32(0))
    return jnp.where(seen, jnp.exp(jnp.cumsum(behind, axis=0)), jnp.float32(0))


def crossing(pairs: Any) -> Any:
    """The gates' gradient from Σ dx ∘ x over pairs (C, C): gate t is in the pairs j < t ≤ i."""
    i, j = tokens_of(pairs.shape[0])
    before = jnp.cumsum(pairs, axis=1) - pairs
    return jnp.sum(jnp.where(i >= j, before, jnp.float32(0)), axis=0)


def scores_of(products: Products, x: Any, block: int, *row: int) -> Any:
    """D ∘ Q Kᵀ, of the queries at `row`."""
    if "scores" in x:
        return x["scores"][(*row, slice(None), slice(None))]
    found = products_of_rows(products, x["q"], x["k"], block, *row)
    return found * pairs_of(x, found.shape[0])


def is_by_channel(x: Any, factor: str) -> bool:
    return len(x[factor].shape) == 2


def faded(x: Any, name: str, factor: str, *where: Any) -> Any:
    """Rows of an input times the factor of their token, the last index but of columns, or of each
    of their channels."""
    rows = x[name][where]
    if factor not in x:
        return rows
    if is_by_channel(x, factor):
        return rows * x[factor][where[-2:]]
    return rows * x[factor][where[-2] if len(where) > 1 else ...][:, None]
