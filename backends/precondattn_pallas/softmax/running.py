"""Online softmax as in flash attention: a running maximum m, a sum l and a weighted sum per row.

    P = e^{S − m},    l ← l e^{m − m'} + rowsum(P),    acc ← acc e^{m − m'} + P v,
    o = acc / l,      λ = m + log l

Exponents and λ are in units of log 2. A row without visible keys has o = 0 and λ = ∞: all of its
weights are 0.
"""

from __future__ import annotations

import jax.numpy as jnp

from precondattn.arrays import Array
from precondattn_pallas.precision import Products

Running = tuple[Array, Array, Array]
"""m (rows), l (rows) and acc (rows, e), in float32."""


def empty(rows: int, e: int) -> Running:
    """m, l and acc before the first tile."""
    return (
        jnp.full((rows,), -jnp.inf, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, e), jnp.float32),
    )


def with_tile(carried: Running, scores: Array, v: Array, products: Products) -> Running:
    """m, l and acc after a tile: scores (rows, columns), −∞ if masked, and values (columns, e)."""
    largest, total, acc = carried
    higher = jnp.maximum(largest, jnp.max(scores, axis=1))
    base = jnp.where(higher == -jnp.inf, 0.0, higher)
    shrink = jnp.exp2(largest - base)
    # Sum the rounded weights that multiply v, so that acc / l is a mean.
    p = jnp.exp2(scores - base[:, None]).astype(v.dtype)
    total = total * shrink + jnp.sum(p.astype(jnp.float32), axis=1)
    return higher, total, acc * shrink[:, None] + products.dot(p, v)


def mean_and_log(carried: Running) -> tuple[Array, Array]:
    """o (rows, e) and λ (rows)."""
    largest, total, acc = carried
    some = jnp.where(total > 0, total, 1.0)
    return acc / some[:, None], jnp.where(total > 0, largest + jnp.log2(some), jnp.inf)
