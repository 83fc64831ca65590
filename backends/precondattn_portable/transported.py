"""Row blocks of PaTH's scores, and their gradient (`spec/transported.py`), linear in memory.

Tokens are split into chunks. Within chunk a, with B = tril(q wᵀ), R = stril(w kᵀ) and
Z = (I + diag(β) stril(w wᵀ))⁻¹ diag(β),

    Q̃ = q − B (Z w)          the query, transported to the start of its chunk,
    K̃ = k − (Z R)ᵀ w         the key, transported to the end of its chunk,
    P = I − wᵀ (Z w)         all reflections of the chunk,
    A_aa = tril(q kᵀ) − B (Z R),    A_ab = Q̃_a P_{a−1} … P_{b+1} K̃_bᵀ.

Forward, chunks come in order of time. Earlier keys are carried along, as in a cache, K ← K P_aᵀ, so
that a row block is one product. A row block may be several chunks high: its later queries are then
carried to its start, and the keys are carried past the whole row block at once. Backward, queries
are carried instead, with chunks in any order: x_{a−1} = Q̃_a, x_{b−1} = x_b P_b, A_ab = x_b K̃_bᵀ.
With dA_ab = D_b,

    dK̃_b += D_bᵀ x_b,    dP_b += x_bᵀ y_{b−1},    y_b = D_b K̃_b + y_{b−1} P_bᵀ,    dQ̃_a = y_{a−1}.

The products P remain products of d × d matrices, in float32 at least; for unit w and β in [0, 2]
they are contractions.
"""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

from precondattn.arrays import Array, Arrays, Index, namespace
from precondattn.spec.array_functions import identity_like, transpose
from precondattn_portable.arithmetic import Arithmetic, Scratch, product_at
from precondattn_portable.layout import Tile, at_chunk, padded, tokens_at
from precondattn_portable.triangular_inverse import unit_lower_inverse


class TransportedChunk(NamedTuple):
    """The matrices of one chunk (…) or of all chunks (b, n, chunks, …)."""

    k: Array
    w: Array
    beta: Array
    """(…, size, 1)"""
    m: Array
    """(I + diag(β) stril(w wᵀ))⁻¹, so that Z = M diag(β)"""
    zr: Array
    zw: Array
    keys: Array
    """K̃"""
    whole: Array
    """P"""
    q: Array
    """(…, r size, d): rows of all the query heads of a key head"""
    q_w: Array
    """B"""
    start: Array
    """Q̃"""
    local: Array
    """A_aa, correct on and below the diagonal"""


class TransportedScores:
    """Scores of queries (b, n, r, s, d) and keys (b, n, s, d), with w (b, n, s, d), beta (b, n, s).

    A row block covers `chunks_per_row_block` chunks: it begins at the start of a chunk, and ends
    with a chunk or with the sequence. Without `gradient`, row blocks come in order of time, each
    of them once; with `gradient`, they are single chunks.
    """

    def __init__(
        self,
        ops: Arithmetic,
        arrays: tuple[Array, Array, Array, Array],
        size: int,
        workspace: Scratch,
        chunks_per_row_block: int = 1,
        *,
        gradient: bool = False,
    ) -> None:
        (q, k, w, beta), self.chunks_per_row_block = arrays, chunks_per_row_block
        (b, n, s, d), self.r = k.shape, q.shape[2]
        self.ops, self.size, self.length = ops, size, s
        missing = -s % size
        self.chunks = (s + missing) // size
        self.shape = (b, n, self.chunks * size, d)
        k, w, beta = (padded(a, 0, missing) for a in (k, w, beta))
        self.all = self._matrices(padded(q, 0, missing, axis=3), k, w, beta, workspace)
        self.gradient = gradient
        if gradient:
            self.d_q_padded = ops.zeros((b, n, self.r, *self.shape[2:]), q)
            self.d_k_padded, self.d_w = ops.zeros(self.shape, k), ops.zeros(self.shape, k)
            self.d_beta, self.d_keys = ops.zeros(self.shape[:3], k), ops.zeros(self.shape, k)
            self.d_whole = ops.zeros(self.all.whole.shape, k)
        else:
            self._start(workspace)

    def _start(self, workspace: Scratch) -> None:
        """Place the keys, none of which is carried, before the first row block."""
        self.carried, self.next = (self._zeros(workspace, name) for name in ("carried", "next"))
        self.at = 0

    def _zeros(self, workspace: Scratch, name: str) -> Array:
        """An array of zeros of the keys' shape."""
        result = workspace.shaped(self.shape, name)
        if result is None:
            return self.ops.zeros(self.shape, self.all.k)
        result[...] = 0.0
        return result

    def from_first(self) -> TransportedScores:
        """These scores, reset so that the next row block is the first."""
        again = copy(self)
        again.gradient = False
        again._start(Scratch())
        return again

    def _matrices(
        self, q: Array, k: Array, w: Array, beta: Array, workspace: Scratch
    ) -> TransportedChunk:
        """The matrices of all chunks, stacked."""
        ops, xp, size = self.ops, namespace(k), self.size
        b, n, _, d = self.shape
        k, w = (xp.reshape(a, (b, n, self.chunks, size, d)) for a in (k, w))
        beta = xp.reshape(beta, (b, n, self.chunks, size, 1))
        scaled, each = beta * w, (b, n, self.chunks, size, size)
        pairs, inverse, products = (workspace.shaped(each, a) for a in ("pairs", "inverse", "zr"))
        overlap = ops.lower(ops.product(scaled, transpose(w), pairs), -1)
        m = unit_lower_inverse(ops, overlap, inverse)
        zr = ops.product(m, ops.lower(ops.product(scaled, transpose(k), pairs), -1), products)
        zw = ops.product(m, scaled)
        keys = ops.add_product(k + 0, transpose(zr), w, -1.0)
        whole = ops.zeros((b, n, self.chunks, d, d), k) + identity_like(k)
        whole = ops.add_product(whole, transpose(w), zw, -1.0)
        q = xp.reshape(q, (b, n, self.r, self.chunks, size, d))
        q = xp.reshape(xp.permute_dims(q, (0, 1, 3, 2, 4, 5)), (b, n, self.chunks, -1, d))
        each = (*q.shape[:4], size)
        q_w = self._lower(ops.product(q, transpose(w), workspace.shaped(each, "pairs")))
        start = ops.add_product(q + 0, q_w, zw, -1.0)
        local = ops.product(q, transpose(k), workspace.shaped(each, "local"))
        local = ops.add_product(local, q_w, zr, -1.0)
        return TransportedChunk(k, w, beta, m, zr, zw, keys, whole, q, q_w, start, local)

    def _at(self, a: int) -> Index:
        return tokens_at(a * self.size, (a + 1) * self.size)

    def _chunk(self, a: int) -> TransportedChunk:
        return TransportedChunk(*(x[at_chunk(a)] for x in self.all))

    def _lower(self, x: Array) -> Array:
        """tril of each query head's rows (…, r size, size)."""
        xp = namespace(x)
        each = xp.reshape(x, (*x.shape[:-2], self.r, self.size, self.size))
        return xp.reshape(self.ops.lower(each), x.shape)

    def row_block(self, tile: Tile, workspace: Scratch) -> Array:
        i0, i1, low, high = tile
        first, last = i0 // self.size, -(-i1 // self.size)
        if self.gradient:
            row_block = self._row_block_of_carried_queries(first, low, high, workspace)
        else:
            self._carry_to(first)
            row_block = self._row_block_of_carried_keys(first, last, low, high, workspace)
        return self._rows(row_block, (last - first) * self.size, i1 - i0)

    def _rows(self, x: Array, rows: int, count: int) -> Array:
        """The first `count` rows of each query head (b, n, r rows, c)."""
        if count == rows:
            return x
        xp, (b, n, _, c) = namespace(x), x.shape
        each = xp.reshape(x, (b, n, self.r, rows, c))
        return xp.reshape(each[:, :, :, :count, :], (b, n, self.r * count, c))

    def carried_to(self, tile: Tile) -> tuple[Array, Array]:
        """The last row block's queries (b, n, r (i1 − i0), d) and keys before it, carried to i0."""
        count = tile.i1 - tile.i0
        rows = -(-count // self.size) * self.size
        return self._rows(self.start, rows, count), self.carried[tokens_at(0, tile.i0)]

    def _row_block_of_carried_keys(
        self, first: int, last: int, low: int, high: int, workspace: Scratch
    ) -> Array:
        """Scores of chunks first … last − 1, with keys carried to the start of the first."""
        ops, size, xp = self.ops, self.size, namespace(self.carried)
        b, n, r, height = *self.shape[:2], self.r, last - first
        within, starts = [], []
        for a in range(first, last):
            x = self.all.start[at_chunk(a)]
            tiles = [self.all.local[at_chunk(a)]]
            for c in range(a - 1, first - 1, -1):
                tiles.insert(0, ops.product(x, transpose(self.all.keys[at_chunk(c)])))
                x = ops.product(x, self.all.whole[at_chunk(c)])
            within.append(tiles)
            starts.append(xp.reshape(x, (b, n, r, 1, size, x.shape[3])))
        start = starts[0] if height == 1 else xp.concat(starts, axis=3)
        self.start = start = xp.reshape(start, (b, n, r * height * size, start.shape[5]))
        # Includes this block's keys, overwritten below: products write contiguous memory faster.
        keys = transpose(self.carried[tokens_at(low, high)])
        row_block = ops.product(start, keys, workspace.shaped((*start.shape[:3], high - low)))
        pieces = xp.reshape(row_block, (b, n, r, height, size, high - low))
        for i, tiles in enumerate(within):
            for c, piece in enumerate(tiles, first):
                j0, j1 = c * size - low, min((c + 1) * size, high) - low
                if j0 < j1:
                    piece = xp.reshape(piece, (b, n, r, size, size))
                    pieces[:, :, :, i, :, j0:j1] = piece[..., : j1 - j0]
        return xp.reshape(pieces, row_block.shape)

    def _carry_to(self, a: int) -> None:
        """Carry the keys of earlier chunks to the start of chunk a."""
        ops = self.ops
        while self.at < a:
            first, stop = self.at, min(self.at + self.chunks_per_row_block, a)
            whole: Array = None  # All reflections of chunks c … stop − 1.
            for c in range(stop - 1, first - 1, -1):
                keys, chunk_whole = self.all.keys[at_chunk(c)], self.all.whole[at_chunk(c)]
                if whole is not None:
                    keys = ops.product(keys, transpose(whole))
                self.next[self._at(c)] = keys
                whole = chunk_whole if whole is None else ops.product(whole, chunk_whole)
            old = tokens_at(0, first * self.size)
            product_at(ops, self.next, old, self.carried[old], transpose(whole))
            self.carried, self.next = self.next, self.carried
            self.at = stop

    def _row_block_of_carried_queries(self, a: int, low: int, high: int, scratch: Scratch) -> Array:
        """Scores of chunk a; keeps its queries as carried to each earlier chunk, for `pull`."""
        x, local = self.all.start[at_chunk(a)], self.all.local[at_chunk(a)]
        shape = (*x.shape[:3], high - low)
        row_block = scratch.shaped(shape)
        row_block = self.ops.empty(shape, x) if row_block is None else row_block
        old = min(a * self.size, high)
        if high > old:
            row_block[..., old - low :] = local[..., : high - old]
        self.x: dict[int, Array] = {}
        for b in range(a - 1, low // self.size - 1, -1):
            self.x[b] = x
            first = max(low - b * self.size, 0)
            keys = transpose(self.all.keys[at_chunk(b, slice(first, old - b * self.size))])
            begin = b * self.size + first - low
            row_block[..., begin : begin + keys.shape[3]] = self.ops.product(x, keys)
            if b * self.size > low:
                x = self.ops.product(x, self.all.whole[at_chunk(b)])
        return row_block

    def pull(self, tile: Tile, d_row_block: Array) -> None:
        i0, i1, low, high = tile
        a, size, ops, xp = i0 // self.size, self.size, self.ops, namespace(d_row_block)
        chunk, index, (b, n), r = self._chunk(a), self._at(a), self.shape[:2], self.r
        if i1 - i0 < size:
            d_row_block = xp.reshape(d_row_block, (b, n, r, i1 - i0, high - low))
            d_row_block = padded(d_row_block, 0, size - (i1 - i0), axis=3)
            d_row_block = xp.reshape(d_row_block, (b, n, r * size, high - low))
        old = min(a * size, high)
        q, q_w = chunk.q, chunk.q_w
        d_q, d_q_w = ops.zeros(q.shape, q), ops.zeros(q_w.shape, q)
        d_zr, d_zw = ops.zeros(chunk.zr.shape, q), ops.zeros(chunk.zw.shape, q)
        if low < old:  # Q̃ = q − B (Z w)
            d_q = self._pull_past(low, old, d_row_block)
            d_q_w = ops.add_product(d_q_w, d_q, transpose(chunk.zw), -1.0)
            d_zw = ops.add_product(d_zw, transpose(q_w), d_q, -1.0)
        if high > old:  # A_aa = q kᵀ − B (Z R)
            d_local = padded(d_row_block[..., old - low :], 0, size - (high - old), axis=3)
            d_q = ops.add_product(d_q, d_local, chunk.k)
            ops.add_product_at(self.d_k_padded, index, transpose(d_local), q)
            d_q_w = ops.add_product(d_q_w, d_local, transpose(chunk.zr), -1.0)
            d_zr = ops.add_product(d_zr, transpose(q_w), d_local, -1.0)
        d_q_w = self._lower(d_q_w)
        d_q = ops.add_product(d_q, d_q_w, chunk.w)
        ops.add_product_at(self.d_w, index, transpose(d_q_w), q)
        self._pull_chunk(a, chunk, d_zr, d_zw)
        rows = slice(a * size, (a + 1) * size)
        self.d_q_padded[:, :, :, rows, :] = xp.reshape(d_q, (b, n, r, size, d_q.shape[3]))

    def _pull_past(self, low: int, old: int, d_row_block: Array) -> Array:
        """dQ̃, from the scores with earlier chunks; adds to their dK̃ and dP."""
        ops, size = self.ops, self.size
        y: Array = None
        for c, x in sorted(self.x.items()):
            first, last = max(c * size, low), min((c + 1) * size, old)
            piece = d_row_block[..., first - low : last - low]
            ops.add_product_at(self.d_keys, tokens_at(first, last), transpose(piece), x)
            keys = self.all.keys[at_chunk(c, slice(first - c * size, last - c * size))]
            d_x = ops.product(piece, keys)
            if y is not None:
                ops.add_product_at(self.d_whole, at_chunk(c), transpose(x), y)
                d_x = ops.add_product(d_x, y, transpose(self.all.whole[at_chunk(c)]))
            y = d_x
        return y

    def _pull_chunk(self, a: int, chunk: TransportedChunk, d_zr: Array, d_zw: Array) -> None:
        """Propagate the gradients of Z R and Z w to k, w and β."""
        xp, ops = namespace(chunk.k), self.ops
        m_t, index = transpose(chunk.m), self._at(a)
        z_t = chunk.beta * m_t
        r = ops.lower(ops.product(chunk.w, transpose(chunk.k)), -1)
        d_z = ops.add_product(ops.product(d_zr, transpose(r)), d_zw, transpose(chunk.w))
        d_r = ops.lower(ops.product(z_t, d_zr), -1)
        d_m = d_z * transpose(chunk.beta)
        d_scaled = -ops.product(m_t, ops.product(d_m, m_t))  # Gradient of diag(β) stril(w wᵀ).
        overlap = ops.lower(ops.product(chunk.w, transpose(chunk.w)), -1)
        d_beta = xp.sum(chunk.m * d_z, axis=-2) + xp.sum(d_scaled * overlap, axis=-1)
        d_overlap = ops.lower(chunk.beta * d_scaled, -1)
        self.d_beta[index] = self.d_beta[index] + d_beta
        ops.add_product_at(self.d_k_padded, index, transpose(d_r), chunk.w)
        ops.add_product_at(self.d_w, index, z_t, d_zw)
        ops.add_product_at(self.d_w, index, d_r, chunk.k)
        ops.add_product_at(self.d_w, index, d_overlap + transpose(d_overlap), chunk.w)

    def gradients(self) -> Arrays:
        """The gradients of q, k, w and β, from the sums of dK̃ and dP over later queries."""
        ops = self.ops
        for a in range(self.chunks):
            chunk, index = self._chunk(a), self._at(a)
            d_keys, d_whole = self.d_keys[index], self.d_whole[at_chunk(a)]
            self.d_k_padded[index] = self.d_k_padded[index] + d_keys
            ops.add_product_at(self.d_w, index, chunk.zr, d_keys, -1.0)
            ops.add_product_at(self.d_w, index, chunk.zw, transpose(d_whole), -1.0)
            d_zr = -ops.product(chunk.w, transpose(d_keys))
            self._pull_chunk(a, chunk, d_zr, -ops.product(chunk.w, d_whole))
        return {
            "q": self.d_q_padded[:, :, :, : self.length, :],
            "k": self.d_k_padded[:, :, : self.length, :],
            "w": self.d_w[:, :, : self.length, :],
            "beta": self.d_beta[:, :, : self.length],
        }
