"""Mesa's query by conjugate gradients in loops (the equations are in `precondattn_portable`).

A query whose residual is not reached is NaN.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax

import precondattn as pa
from precondattn.arrays import Tree
from precondattn.spec.mesa_query import Read
from precondattn_jax.arithmetic import JAX
from precondattn_jax.chunkwise import Chunkwise
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
        return _by_iteration(ops, leaf, times, MesaProblem.of_queries(leaf, right, diagonal, ridge))

    result: Array = lax.custom_linear_solve(times, q, solve, symmetric=True)
    return result


def _by_iteration(ops: Arithmetic, leaf: pa.MesaQuery, times: Read, problem: MesaProblem) -> Array:
    most = leaf.most_iterations(problem.right.shape[-1])

    def is_open(carry: Tree) -> Array:
        search, used = carry
        return (used < most) & jnp.any(problem.recurring(search.r).is_large())

    def advanced(carry: Tree) -> Tree:
        search, used = carry
        return search.advanced(ops, times, problem.diagonal), used + 1

    def is_left(carry: Tree) -> Array:
        _, _, left, used = carry
        return (used < most) & jnp.any(left.is_large())

    def again(carry: Tree) -> Tree:
        x, rest, _, used = carry
        start = (Search.towards(rest, problem.diagonal), used)
        search, used = lax.while_loop(is_open, advanced, start)
        x = x + search.x
        return x, *problem.residual(times, x), used

    start = (problem.right * 0, problem.right, problem.recurring(problem.right), 0)
    x, _, left, _ = lax.while_loop(is_left, again, start)
    return jnp.where(left.is_small(), x * problem.scale, math.nan)


class SolvingChunkwise(Solving, Chunkwise):
    """The recurrence in chunks, which are read as often as the iteration needs."""

    ops = JAX
    by = staticmethod(solved)
