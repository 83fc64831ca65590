"""Products in full precision, and zeros for the carry of a loop.

By default, JAX multiplies float32 with fewer bits on accelerators. Here all bits are requested,
unless the user has set `jax.default_matmul_precision`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import jax
import jax.numpy as jnp
from jax import Array, lax

from precondattn.arrays import Arrays
from precondattn_portable.arithmetic import Arithmetic


def precision() -> lax.Precision | None:
    """The precision of products: the user's setting, or full precision."""
    is_set = jax.config.jax_default_matmul_precision is not None
    return None if is_set else lax.Precision.HIGHEST


def full_precision() -> AbstractContextManager[object]:
    """A context in which all products have that precision."""
    return nullcontext() if precision() is None else jax.default_matmul_precision("highest")


def product(a: Array, b: Array) -> Array:
    """a b"""
    return jnp.matmul(a, b, precision=precision())


def product_with_transposed(a: Array, b: Array) -> Array:
    """a bᵀ"""
    return jnp.matmul(a, jnp.matrix_transpose(b), precision=precision())


def transposed_product(a: Array, b: Array) -> Array:
    """aᵀ b, computed as the transpose of bᵀ a.

    On a CPU, XLA does this three times as fast where a is much wider than b.
    """
    result = jnp.einsum("...id,...is->...ds", b, a, precision=precision())
    return jnp.matrix_transpose(result)


def zeros(shape: tuple[int, ...], like: Array) -> Array:
    """Zeros of like's dtype, which vary over the same axes of a `shard_map`.

    A loop's carry must vary over the axes of what is added to it.

    The compiler does not know that they are zeros. If it did, jaxlib 0.10.2 on a CPU would read a
    product with them, and a sum over it, from memory that nothing has written: one of several
    errors where it joins sums with products (jax-ml/jax issue 39103).
    """
    result = jnp.zeros_like(like, shape=shape)
    if not shape or 0 in like.shape:
        return result
    element = lax.stop_gradient(like[(0,) * like.ndim])
    zero = jnp.where(jnp.isnan(element), 0, jnp.minimum(jnp.abs(element), 0))
    return result + zero * jnp.arange(shape[-1], dtype=like.dtype)[(None,) * (len(shape) - 1)]


class JaxArithmetic(Arithmetic):
    """Nothing is written in place explicitly: XLA does it where possible."""

    def zeros(self, shape: tuple[int, ...], like: Array) -> Array:
        return zeros(shape, like)

    empty = zeros

    def product(self, a: Array, b: Array, out: Array | None = None) -> Array:
        return product(a, b)

    def add_product(self, total: Array, a: Array, b: Array, factor: float = 1.0) -> Array:
        result = product(a, b)
        return total + (result if factor == 1.0 else factor * result)

    def summed(self, count: Array, term: Callable[[Array | int], Arrays]) -> Arrays:
        def step(i: Array, total: Arrays) -> Arrays:
            added: Arrays = jax.tree.map(jnp.add, total, term(i))
            return added

        total: Arrays = lax.fori_loop(1, count, step, term(0))
        return total


JAX = JaxArithmetic()
