"""The recurrence in chunks of tokens as products of matrices, in a loop over groups of chunks.

No loop runs over the tokens of a chunk; only the state is passed from chunk to chunk. A step of the
loop processes as many chunks as fit a CPU's cache, and computes everything but the state at once.
The gradient stores the state before every group, and recomputes those within it. Conjugate
gradients for Mesa's query read the chunks repeatedly. The equations are in `precondattn_portable`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

import precondattn as pa
from precondattn.arrays import Tree
from precondattn.spec.mesa_query import Read
from precondattn.spec.recurrence import AllTokens, Stream, StreamGradients
from precondattn_jax.arithmetic import JAX, zeros
from precondattn_jax.chunk_groups import group_of
from precondattn_jax.layout import is_known, padded
from precondattn_jax.loops import PLAIN, Loops, refined
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.chunkwise_additive import WrittenChunks
from precondattn_portable.mesa_query import MesaProblem, Search, Solving

CHUNK = 64
"""Tokens of a chunk, a power of two: larger costs more within chunks, smaller more between them."""

GROUP = 2**17
"""Elements of an array of the chunks that are computed at once: 512 KiB in float32, which fit a
core's cache."""


class Chunkwise(AllTokens):
    """A `Form` of the recurrence (`precondattn.spec.recurrence`)."""

    def __init__(self, loops: Loops = PLAIN) -> None:
        self.loops = loops

    def forward(self, x: Stream, state: Array) -> tuple[Array, Array]:
        work = ChunkWork(x)
        chunks = (work.written, work.chunks(x.q))
        last, o = self.loops.scan(work.read, work.joined(state), chunks)
        return work.reads(o), jnp.reshape(last, state.shape)

    def vjp(self, x: Stream, state: Array, d_o: Array, d_final: Array) -> StreamGradients:
        work = ChunkWork(x)
        _, before = lax.scan(work.advance, work.joined(state), work.written)
        chunks = (before, work.written, work.chunks(x.q), work.chunks(d_o))
        first, (d_q, result) = lax.scan(work.pull, work.joined(d_final), chunks, reverse=True)
        stream = Stream(work.reads(d_q), *(None if a is None else work.tokens(a) for a in result))
        d_beta = None if stream.beta is None else stream.beta[..., 0]
        stream = stream._replace(g=jnp.reshape(stream.g, x.g.shape), beta=d_beta)
        return StreamGradients(stream, jnp.reshape(first, d_final.shape))

    def reread(
        self, x: Stream, state: Array, function: Callable[..., Array], *arrays: Array
    ) -> tuple[Array, Array]:
        """function(read, *arrays) for one group of chunks after another, and the final state.

        `arrays` belong to the queries' tokens, and x has no queries. read(q) returns the outputs of
        queries q in the layout of the group, (c, n, C, r, w).
        """
        work = ChunkWork(x._replace(q=arrays[0]))

        def of_group(state: Array, stacks: Tree) -> tuple[Array, Array]:
            chunks, *parts = stacks
            group = group_of(x, chunks)
            states = group.states(state)
            group.read(parts[0], states)  # Fills the group's cached arrays outside the inner loop.
            return states[-1], function(lambda q: group.read(q, states), *parts)

        stacks = (work.written, *map(work.chunks, arrays))
        last, out = self.loops.scan(of_group, work.joined(state), stacks)
        return work.reads(out), jnp.reshape(last, state.shape)


class ChunkWork:
    """A stream in groups of chunks (groups, c, n, C, …), n the heads of all sequences."""

    def __init__(self, x: Stream) -> None:
        self.x = x
        self.b, self.m, self.s = x.k.shape[:3]
        self.t = x.q.shape[2]
        self.size = min(CHUNK, 1 << (self.s - 1).bit_length()) if is_known(self.s) else CHUNK
        self.groups = count = -(-self.s // self.size)
        self.together = 1
        if is_known(self.b, self.m, self.s):  # Otherwise one chunk is computed after the other.
            widest = max(x.k.shape[3], x.v.shape[3], self.size)
            most = max(GROUP // (self.b * self.m * self.size * widest), 1)
            self.groups = -(-count // most)
            self.together = -(-count // self.groups)
        g = jnp.reshape(x.g, (self.b, self.m, self.s, -1))
        beta = None if x.beta is None else x.beta[..., None]
        arrays = WrittenChunks(x.k, x.v, g, beta, x.erase, x.undecayed)
        self.written = WrittenChunks(*(a if a is None else self.chunks(a) for a in arrays))

    def chunks(self, x: Array) -> Array:
        """Chunks of (b, m, s, …) or of the last t tokens, padded with zeros before and after."""
        after = self.groups * self.together * self.size - self.s
        x = padded(x, self.s - x.shape[2], after, 2)
        rest = x.shape[3:]
        x = jnp.reshape(x, (self.b, self.m, self.groups, self.together, self.size, *rest))
        x = jnp.moveaxis(x, (2, 3), (0, 1))
        return jnp.reshape(x, (self.groups, self.together, self.b * self.m, self.size, *rest))

    def tokens(self, x: Array) -> Array:
        """Chunks as tokens (b, m, s, …), the reverse of `chunks`."""
        rest = x.shape[4:]
        x = jnp.reshape(x, (self.groups, self.together, self.b, self.m, self.size, *rest))
        x = jnp.moveaxis(x, (0, 1), (2, 3))
        return jnp.reshape(x, (self.b, self.m, -1, *rest))[:, :, : self.s]

    def reads(self, x: Array) -> Array:
        return self.tokens(x)[:, :, self.s - self.t :]

    def joined(self, state: Array) -> Array:
        """States (b, m, d, e) as (n, d, e)."""
        state = jnp.reshape(state, (self.b * self.m, *state.shape[2:]))
        return state + zeros(state.shape, self.x.k)

    # The bodies of the loops.

    def read(self, state: Array, chunk: tuple[WrittenChunks, Array]) -> tuple[Array, Array]:
        """The state after a group, and the outputs within it."""
        chunks, q = chunk
        group = group_of(self.x, chunks)
        states = group.states(state)
        return states[-1], group.read(q, states)

    def advance(self, state: Array, chunks: WrittenChunks) -> tuple[Array, Array]:
        """The state after a group, and the one before."""
        return group_of(self.x, chunks).states(state)[-1], state

    def pull(self, d_state: Array, chunk: Tree) -> tuple[Array, tuple[Array, WrittenChunks]]:
        """Gradients of the state before a group, of its queries and of its written inputs."""
        state, chunks, q, d_o = chunk
        group = group_of(self.x, chunks)
        states = group.states(state)
        d_states = group.d_states(q, d_o, d_state)
        return d_states[0], group.vjp(q, d_o, states, d_states)


def solved(
    ops: Arithmetic, leaf: pa.MesaQuery, read: Read, q: Array, diagonal: Array, ridge: Array
) -> Array:
    """q* of queries (…, d), differentiable: a linear solve with a symmetric matrix.

    A query whose residual stays too large is NaN.
    """
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
    """The recurrence in chunks, with a read of each group for every iteration."""

    ops = JAX
    by = staticmethod(solved)
