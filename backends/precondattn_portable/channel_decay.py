"""Products of pairs of tokens in a chunk, with one decay for each channel (GLA, KDA).

    F(A, x, y) = Σ_{i≥j,c} A_ij x_ic y_jc D_ijc,    D_ijc = e^{g_{j+1,c} + … + g_ic}.

D multiplies every channel of a product, not the product. So the pairs of a chunk are partitioned
into squares in which D factors: the second half of a block of tokens with its first half, for
blocks of 2, 4, … C tokens. Relative to the middle m of the block,

    D_ijc = e^{g_{m+1,c} + … + g_ic} e^{g_{j+1,c} + … + g_mc},

and both exponents are ≤ 0. (The sub-chunks of flash-linear-attention's GLA are the first of these
halvings, followed by exact pairs. Here each token and channel has log₂ C exponentials, and the rest
are products.) The sums of a block of twice the width are those of its halves, where one half adds
the other's total: as in `head_decay.py`, none is a difference.

F's derivative with respect to A is the scores of x and y; with respect to x, it is what A reads
from y. The derivative with respect to the gate of token t sums over the pairs that t separates: in
the second half those from t on, in the first half those before t.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import transpose
from precondattn_portable.arithmetic import Arithmetic, changed_at
from precondattn_portable.head_decay import ChunkDecay, decayed, flat, sums_before, sums_from

ALL = slice(None)
FIRST, SECOND = (ALL, ALL, ALL, 0, ...), (ALL, ALL, ALL, 1, ...)
"""The halves of (c, n, blocks, 2, half, …)."""


class HalvedDecay(NamedTuple):
    """The decay between each token and the middle of its block."""

    half: int
    since: Array
    """The decay from the middle to tokens of the second half (c, n, blocks, half, w)."""
    until: Array
    """The decay from tokens of the first half to the middle."""


class ChannelDecay(ChunkDecay):
    """Decays of gates (c, n, C, w), C a power of two."""

    def __init__(self, ops: Arithmetic, g: Array, like: Array) -> None:
        super().__init__(ops, g)
        self.size = like.shape[2]

    @cached_property
    def halvings(self) -> list[HalvedDecay]:
        """The decays of blocks with halves of 1, 2, 4 … tokens."""
        xp = namespace(self.g)
        result = []
        since, until = self.g + 0, xp.zeros_like(self.g)
        half = 1
        while half < self.size:
            shape = self._blocks(self.g, half)
            since, until = xp.reshape(since, shape), xp.reshape(until, shape)
            first, second = until[FIRST], since[SECOND]
            result.append(HalvedDecay(half, xp.exp(second), xp.exp(first)))
            since, until = self._with_totals(since, until)
            half *= 2
        return result

    def _with_totals(self, since: Array, until: Array) -> tuple[Array, Array]:
        """The sums of blocks, from those of their halves: each half adds the other's total."""
        # A half's total is read before its own sums change.
        changed_at(self.ops.add, until, FIRST, since[SECOND][..., -1:, :])
        changed_at(self.ops.add, since, SECOND, since[FIRST][..., -1:, :])
        return since, until

    def scores(self, x: Array, y: Array, *, diagonal: bool = True) -> Array:
        """dF/dA, 0 above the diagonal, and without `diagonal` on it too."""
        xp = namespace(x)
        chunks, heads, size, r, _ = x.shape
        shape = (chunks, heads, size, r, 1)
        if diagonal:
            whole = xp.reshape(xp.sum(x * y[..., None, :], axis=-1), shape)
        else:
            whole = self.ops.zeros(shape, x)
        for half, since, until in self.halvings:
            later, earlier = self._second(x, half, since), self._first(y, half, until)
            corner = self.ops.product(later, transpose(earlier))
            blocks = size // (2 * half)
            whole = xp.reshape(whole, (chunks, heads, blocks, 2, half * r, half))
            wider = self.ops.zeros((chunks, heads, blocks, 2 * half * r, 2 * half), x)
            wider[..., : half * r, :half] = whole[FIRST]
            wider[..., half * r :, half:] = whole[SECOND]
            wider[..., half * r :, :half] = corner
            whole = wider
        return xp.reshape(whole, (chunks, heads, size * r, size))

    def read(self, a: Array, y: Array, r: int) -> Array:
        """dF/dx from A (c, n, C r, C), of which only the lower part is read."""
        xp = namespace(a)
        corners, diagonal = self._corners(a, r)
        o = diagonal * y[..., None, :]
        for (half, since, until), corner in zip(self.halvings, corners, strict=True):
            result = self.ops.product(corner, self._first(y, half, until))
            o = xp.reshape(o, (*self._blocks(y, half)[:-1], r, y.shape[-1]))
            result = xp.reshape(result, o[SECOND].shape)
            changed_at(self.ops.add, o, SECOND, self.ops.multiply(result, since[..., None, :]))
        return xp.reshape(o, (*y.shape[:3], r, y.shape[-1]))

    def gradients(self, a: Array, x: Array, y: Array) -> tuple[Array, Array, Array]:
        """dF/dx, dF/dy and dF/dg."""
        xp = namespace(a)
        r, width = x.shape[3], x.shape[4]
        corners, diagonal = self._corners(a, r)
        d_x, d_y = diagonal * y[..., None, :], xp.sum(diagonal * x, axis=3)
        d_g = xp.zeros_like(y)
        for (half, since, until), corner in zip(self.halvings, corners, strict=True):
            shape = self._blocks(y, half)
            rows = (*shape[:-1], r, width)
            d_x, d_y, d_g = xp.reshape(d_x, rows), xp.reshape(d_y, shape), xp.reshape(d_g, shape)
            later, earlier = self._second(x, half, since), self._first(y, half, until)

            read = xp.reshape(self.ops.product(corner, earlier), d_x[SECOND].shape)
            crossing = xp.sum(read * xp.reshape(later, read.shape), axis=-2)
            changed_at(self.ops.add, d_g, SECOND, sums_from(crossing))
            changed_at(self.ops.add, d_x, SECOND, self.ops.multiply(read, since[..., None, :]))

            written = self.ops.product(transpose(corner), later)
            changed_at(self.ops.add, d_g, FIRST, sums_before(written * earlier))
            changed_at(self.ops.add, d_y, FIRST, self.ops.multiply(written, until))
        return xp.reshape(d_x, x.shape), xp.reshape(d_y, y.shape), xp.reshape(d_g, y.shape)

    def pull(
        self, scores: Array, d_scores: Array, x: Array, y: Array, d_x: Array, d_y: Array
    ) -> tuple[Array, Array, Array]:
        """The gradients of x and y, added to d_x and d_y, and that of the gates."""
        more_x, more_y, d_g = self.gradients(d_scores, x, y)
        return self.ops.add(more_x, d_x), self.ops.add(more_y, d_y), d_g

    def of_states(self, q: Array, states: Array) -> Array:
        o = self.ops.product(flat(decayed(q, self.reading)), states)
        return namespace(o).reshape(o, (*q.shape[:-1], o.shape[-1]))

    def _blocks(self, y: Array, half: int) -> tuple[int, ...]:
        """Tokens as blocks of two halves: (c, n, blocks, 2, half, w)."""
        return (*y.shape[:2], self.size // (2 * half), 2, half, y.shape[-1])

    def _first(self, y: Array, half: int, until: Array) -> Array:
        """(c, n, blocks, half, w)"""
        return namespace(y).reshape(y, self._blocks(y, half))[FIRST] * until

    def _second(self, x: Array, half: int, since: Array) -> Array:
        """(c, n, blocks, half r, w)"""
        xp = namespace(x)
        r, width = x.shape[3], x.shape[4]
        blocks = xp.reshape(x, (*self._blocks(x, half)[:-1], r, width))[SECOND]
        decayed = blocks * since[..., None, :]
        return xp.reshape(decayed, (*decayed.shape[:3], half * r, width))

    def _corners(self, a: Array, r: int) -> tuple[list[Array], Array]:
        """The squares of A for half blocks of 1, 2 … tokens, and its diagonal (c, n, C, r, 1)."""
        xp = namespace(a)
        chunks, heads = a.shape[:2]
        whole = xp.reshape(a, (chunks, heads, 1, self.size * r, self.size))
        corners = []
        for half, _, _ in reversed(self.halvings):
            corners.append(whole[..., half * r :, :half])
            blocks = whole.shape[2]
            narrower = self.ops.empty((chunks, heads, blocks, 2, half * r, half), a)
            narrower[FIRST] = whole[..., : half * r, :half]
            narrower[SECOND] = whole[..., half * r :, half:]
            whole = xp.reshape(narrower, (chunks, heads, 2 * blocks, half * r, half))
        return corners[::-1], xp.reshape(whole, (chunks, heads, self.size, r, 1))
