"""JAX's `solve` of a stack of systems: on a CPU, one system at a time.

Of a stack, a call of LAPACK spreads the matrices over XLA's threads and waits for them, on one of
these threads. As many such calls at once as there are threads wait for ever.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax


@jax.jit
def solve(matrix: Array, right: Array) -> Array:
    """matrix⁻¹ right, of stacks (…, s, s) and (…, s, e)."""
    found: Array = lax.platform_dependent(matrix, right, cpu=_one_by_one, default=jnp.linalg.solve)
    return found


def _one_by_one(matrix: Array, right: Array) -> Array:
    systems = tuple(jnp.reshape(x, (-1, *x.shape[-2:])) for x in (matrix, right))
    return jnp.reshape(lax.map(_solve_one, systems), right.shape)


def _solve_one(system: tuple[Array, Array]) -> Array:
    return jnp.linalg.solve(*system)
