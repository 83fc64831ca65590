"""JAX's `solve` of a stack of systems: on a CPU, one system at a time.

Of a stack, a call of LAPACK spreads the matrices over XLA's threads and waits for them, on one of
these threads. As many such calls at once as there are threads wait for ever. An axis that `vmap`
adds is a stack, too.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap


@jax.jit
def solve(matrix: Array, right: Array) -> Array:
    """matrix⁻¹ right, of stacks (…, s, s) and (…, s, e)."""
    found: Array = lax.platform_dependent(matrix, right, cpu=_on_a_cpu, default=jnp.linalg.solve)
    return found


def _on_a_cpu(matrix: Array, right: Array) -> Array:
    # What solves is not differentiated: JAX takes the derivatives from the product and solves anew.
    found: Array = lax.custom_linear_solve(
        lambda x: matrix @ x,
        right,
        solve=lambda _, b: _one_by_one(matrix, b),
        transpose_solve=lambda _, b: _one_by_one(jnp.matrix_transpose(matrix), b),
    )
    return found


@custom_vmap
def _one_by_one(matrix: Array, right: Array) -> Array:
    systems = tuple(jnp.reshape(x, (-1, *x.shape[-2:])) for x in (matrix, right))
    found = lax.map(lambda system: jnp.linalg.solve(*system), systems)
    return jnp.reshape(found, right.shape)


@_one_by_one.def_vmap
def _longer_stack(size: int, mapped: list[bool], matrix: Array, right: Array) -> tuple[Any, bool]:
    """One more axis in front."""
    both = (
        x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
        for x, has_axis in zip((matrix, right), mapped, strict=True)
    )
    return _one_by_one(*both), True
