"""Mesa's query by conjugate gradients, on a group of chunks at a time.

    (H_t + diag λ) q*_t = q_t,    H_t p = read of p from the states of a linear attention

The states of the chunks are computed once. A product with H_t, for all tokens of a group, is then a
read of a linear attention: two products within the chunk, and one with its state. No H_t is formed.
Queries are preconditioned by the diagonal D = diag(H_t) + λ, itself the read of a recurrence:

    α = r·z / p·(M p),    x += α p,    r −= α M p,    z = r / D,    p = z + (r·z)⁺ / (r·z) p.

with M = H_t + diag λ. Rounding makes the recurrence's residual drift from q − M x. So q − M x is
computed at the end, and the iteration is restarted from it where it is too large.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import precondattn as pa
from precondattn.arrays import Array, has_only_a_shape, namespace
from precondattn.spec.array_functions import identity_like, row_sum
from precondattn.spec.mesa_query import Read
from precondattn.spec.positive_definite import ROUNDINGS, tolerance_of
from precondattn.spec.recurrence import Form, Stream
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.block_conjugate_gradients import Residual, lengths, sizes
from precondattn_portable.chunkwise import Chunkwise
from precondattn_portable.stateful import StatefulAlgorithm


class Search(NamedTuple):
    """The state of every query's iteration (…, d): x, r, p and r·z."""

    x: Array
    r: Array
    p: Array
    size: Array

    @classmethod
    def towards(cls, right: Array, diagonal: Array) -> Search:
        z = right / diagonal
        return cls(right * 0, right + 0, z, row_sum(right * z))

    def advanced(self, ops: Arithmetic, times: Read, diagonal: Array) -> Search:
        """The state after one more product, in the same arrays if the library supports it."""
        image = times(self.p)
        along = _ratio(self.size, row_sum(self.p * image))
        x = ops.add_multiple(self.x, along, self.p)
        r = ops.add_multiple(self.r, -along, image)
        z = r / diagonal
        size = row_sum(r * z)
        return Search(x, r, ops.add_multiple(z, _ratio(size, self.size), self.p), size)


def _ratio(a: Array, b: Array) -> Array:
    """a / b, 0 where b is 0, as it is once a query is solved; NaN where b is."""
    xp = namespace(a)
    is_zero = b == 0
    return xp.where(is_zero, 0.0, a / xp.where(is_zero, 1.0, b))


class MesaProblem(NamedTuple):
    """The queries to solve for, scaled to a largest entry of 1, and the residual allowed."""

    right: Array
    scale: Array
    diagonal: Array
    ridge: Array
    tolerance: float

    @classmethod
    def of_queries(cls, leaf: pa.MesaQuery, q: Array, diagonal: Array, ridge: Array) -> MesaProblem:
        xp = namespace(q)
        scale = sizes(q, -1)
        # The diagonal is 0 at padding.
        diagonal = xp.where(diagonal == 0, 1.0, diagonal)
        return cls(q / scale, scale, diagonal, ridge, tolerance_of(leaf, q))

    def recurring(self, r: Array) -> Residual:
        """The lengths of the recurrence's residual r, and the lengths allowed."""
        return Residual(lengths(r, -1), self.tolerance * lengths(self.right, -1))

    def is_open(self, search: Search, allowed: Array, least: Array) -> bool:
        """Whether the residual of the recurrence is still large for any query.

        ‖r‖² is at least r·z times the smallest entry of D, `least`. If this bound is large already,
        ‖r‖² is not computed.
        """
        xp = namespace(least)
        if xp.any(Residual(search.size * least, allowed * allowed).is_large()):
            return True
        return bool(xp.any(Residual(lengths(search.r, -1), allowed).is_large()))

    def residual(self, times: Read, x: Array) -> tuple[Array, Residual]:
        """q − M x, its lengths, and the lengths allowed."""
        rest = self.right - times(x)
        rounding = ROUNDINGS * float(namespace(x).finfo(x.dtype).eps)
        norm = row_sum(self.diagonal)  # The trace of M, an upper bound of its norm.
        allowed = self.tolerance * lengths(self.right, -1) + rounding * norm * lengths(x, -1)
        return rest, Residual(lengths(rest, -1), allowed)


def solved(
    ops: Arithmetic, leaf: pa.MesaQuery, read: Read, q: Array, diagonal: Array, ridge: Array
) -> Array:
    """q* of queries (…, d). Raises a NotSolvedError where a residual is not reached."""
    xp, problem = namespace(q), MesaProblem.of_queries(leaf, q, diagonal, ridge)
    if has_only_a_shape(q):
        return q
    used, most = 0, leaf.most_iterations(q.shape[-1])
    x, rest = problem.right * 0, problem.right

    def times(p: Array) -> Array:
        return ops.add_multiple(read(p), ridge, p)

    allowed = problem.recurring(rest).allowed
    least = xp.min(problem.diagonal, axis=-1, keepdims=True)
    while True:
        search = Search.towards(rest, problem.diagonal)
        while used < most and problem.is_open(search, allowed, least):
            search, used = search.advanced(ops, times, problem.diagonal), used + 1
        x = x + search.x
        rest, left = problem.residual(times, x)
        if not xp.any(left.is_large()):
            return x * problem.scale
        if used == most:
            raise leaf.not_solved(left.worst(lengths(problem.right, -1)), used, problem.tolerance)


class Solving:
    """The methods by which a chunkwise form solves for queries."""

    ops: Arithmetic
    forward: Callable[[Stream, Array], tuple[Array, Array]]
    reread: Callable[..., tuple[Array, Array]]
    by: Callable[..., Array] = staticmethod(solved)

    def solve_by_iteration(
        self, leaf: pa.MesaQuery, x: Stream, state: Array, q: Array, ridge: Array
    ) -> tuple[Array, Array]:
        """(H + diag λ)⁻¹ q of queries (b, m, t, r, d), and the final H."""
        xp, one = namespace(q), namespace(q).ones_like(x.k[..., :1])
        ridge = xp.broadcast_to(ridge, q.shape)
        squares = Stream(one[:, :, one.shape[2] - q.shape[2] :, None, :], one, x.k * x.v, x.g)
        of_state = xp.sum(state * identity_like(state), axis=-2, keepdims=True)
        diagonal = xp.broadcast_to(self.forward(squares, of_state)[0] + ridge, q.shape)
        return self.reread(x, state, partial(self.by, self.ops, leaf), q, diagonal, ridge)


class SolvingChunkwise(Solving, Chunkwise):
    """The recurrence in chunks, with a read of each group for every iteration."""


class MesaQueryAlgorithm(StatefulAlgorithm[pa.MesaQuery]):
    """Algorithm of `MesaQuery`. One token, and few tokens, are solved as defined."""

    by_pairs = False

    def in_chunks(self) -> Form:
        return SolvingChunkwise(self.ops)
