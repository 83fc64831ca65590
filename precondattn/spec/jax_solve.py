"""JAX's `solve` of a batch of systems: on a CPU, one system at a time.

A batched call of LAPACK distributes the matrices over XLA's threads and waits for them, on one of
these threads. Running as many batched solves at once as there are threads deadlocks. An axis that
`vmap` adds makes a batch too.
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
    solution: Array = lax.platform_dependent(
        matrix, right, cpu=_solve_on_cpu, default=jnp.linalg.solve
    )
    return solution


def _solve_on_cpu(matrix: Array, right: Array) -> Array:
    # JAX does not differentiate the solver: a derivative is another solve, with the derivative of
    # the product on the right-hand side.
    solution: Array = lax.custom_linear_solve(
        lambda x: matrix @ x,
        right,
        solve=lambda _, b: _one_by_one(matrix, b),
        transpose_solve=lambda _, b: _one_by_one(jnp.matrix_transpose(matrix), b),
    )
    return solution


@custom_vmap
def _one_by_one(matrix: Array, right: Array) -> Array:
    systems = tuple(jnp.reshape(x, (-1, *x.shape[-2:])) for x in (matrix, right))
    solutions = lax.map(lambda system: jnp.linalg.solve(*system), systems)
    return jnp.reshape(solutions, right.shape)


@_one_by_one.def_vmap
def _mapped(size: int, mapped: list[bool], matrix: Array, right: Array) -> tuple[Any, bool]:
    """The mapped axis as one more batch axis."""
    both = (
        x if has_axis else jnp.broadcast_to(x, (size, *x.shape))
        for x, has_axis in zip((matrix, right), mapped, strict=True)
    )
    return _one_by_one(*both), True
