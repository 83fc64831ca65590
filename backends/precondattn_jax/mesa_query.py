"""Mesa's query by conjugate gradients in loops (the equations are in `precondattn_portable`).

A query whose residual is not reached is NaN.
"""

from __future__ import annotations

from jax import Array, lax

import precondattn as pa
from precondattn.spec.mesa_query import Read
from precondattn_jax.arithmetic import JAX
from precondattn_jax.chunkwise import Chunkwise
from precondattn_jax.loops import refined
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.mesa_query import MesaProblem, Search, Solving


def solved(
    ops: Arithmetic, leaf: pa.MesaQuery, read: Read, q: Array, diagonal: Array, ridge: Array
) -> Array:
    """q* of queries (…, d), differentiable: a linear solve with a symmetric matrix."""
    diagonal = lax.stop_gradient(diagonal)

    def times(p: Array) -> Array:
        return ops.add_multiple(read(p), ridge, p)

    def solve(times: Read, right: Array) -> Array:
        problem = MesaProblem.of_queries(leaf, right, diagonal, ridge)
        x = refined(
            problem.right,
            problem.recurring(problem.right),
            leaf.most_iterations(right.shape[-1]),
            lambda rest: Search.towards(rest, problem.diagonal),
            lambda search: search.advanced(ops, times, problem.diagonal),
            lambda search: problem.recurring(search.r),
            lambda x: problem.residual(times, x),
        )
        return x * problem.scale

    return lax.custom_linear_solve(times, q, solve, symmetric=True)


class SolvingChunkwise(Solving, Chunkwise):
    """The recurrence in chunks, which are read as often as the iteration needs."""

    ops = JAX
    by = staticmethod(solved)
