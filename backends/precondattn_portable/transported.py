"""Strips of PaTH's scores, and their gradient (`spec/transported.py`), linear in memory.

Tokens are cut into chunks. Within chunk a, with B = tril(q wᵀ), R = stril(w kᵀ) and
Z = (I + diag(β) stril(w wᵀ))⁻¹ diag(β),

    Q̃ = q − B (Z w)          the query, transported to the start of its chunk,
    K̃ = k − (Z R)ᵀ w         the key, transported to the end of its chunk,
    P = I − wᵀ (Z w)         all reflections of the chunk,
    A_aa = tril(q kᵀ) − B (Z R),    A_ab = Q̃_a P_{a−1} … P_{b+1} K̃_bᵀ.

Forward, the chunks come in order of time, and the keys of the past are carried along as a cache
carries them, K ← K P_aᵀ: a strip is then one product. Backward, queries are carried instead, in any
order of the chunks: x_{a−1} = Q̃_a, x_{b−1} = x_b P_b, A_ab = x_b K̃_bᵀ, and with dA_ab = D_b,

    dK̃_b += D_bᵀ x_b,    dP_b += x_bᵀ y_{b−1},    y_b = D_b K̃_b + y_{b−1} P_bᵀ,    dQ̃_a = y_{a−1}.

The products P stay products of d × d matrices, in float32 at least; for unit w and β in [0, 2] they
are contractions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from precondattn.arrays import Array, namespace, placement
from precondattn.spec.array_functions import transpose
from precondattn_portable.arithmetic import Arithmetic, Scratch
from precondattn_portable.layout import at, at_chunk, padded
from precondattn_portable.scores import block_of_rows
from precondattn_portable.triangular_inverse import unit_lower_inverse


class Chunk(NamedTuple):
    """The matrices of one chunk."""

    k: Array
    w: Array
    beta: Array
    """(b, n, size, 1)"""
    r: Array
    """R"""
    m: Array
    """(I + diag(β) stril(w wᵀ))⁻¹, so that Z = M diag(β)"""
    zr: Array
    zw: Array

    def keys(self, ops: Arithmetic) -> Array:
        """K̃"""
        return ops.add_product(self.k + 0, transpose(self.zr), self.w, -1.0)

    def all(self, ops: Arithmetic) -> Array:
        """P"""
        d = self.k.shape[3]
        identity = namespace(self.k).eye(d, dtype=self.k.dtype, **placement(self.k))
        whole = ops.zeros((*self.k.shape[:2], d, d), self.k) + identity
        return ops.add_product(whole, transpose(self.w), self.zw, -1.0)


class TransportedScores:
    """Of queries (b, n, r, s, d) and keys (b, n, s, d) with w (b, n, s, d) and beta (b, n, s).

    Blocks of queries are chunks: they begin at a multiple of `size`, and end at the next one, or
    with the sequence. Without `gradient` they come in order of time, and each strip once.
    """

    def __init__(
        self,
        ops: Arithmetic,
        q: Array,
        k: Array,
        w: Array | None,
        beta: Array | None,
        size: int,
        *,
        gradient: bool = False,
    ) -> None:
        assert w is not None
        assert beta is not None
        self.ops, self.size, self.length = ops, size, k.shape[2]
        missing = -self.length % size
        b, n, _, d = k.shape
        self.chunks = (self.length + missing) // size
        self.q = padded(q, 0, missing, axis=3)
        self.k, self.w, self.beta = (padded(a, 0, missing) for a in (k, w, beta))
        self.m = self._inverses()
        self.gradient = gradient
        shape = self.k.shape
        if gradient:
            self.keys = ops.empty(shape, k)
            self.whole = ops.empty((b, n, self.chunks, d, d), k)
            for a in range(self.chunks):
                chunk = self._chunk(a)
                self.keys[self._at(a)] = chunk.keys(ops)
                self.whole[at_chunk(a)] = chunk.all(ops)
            self.d_q_padded, self.d_k_padded = ops.zeros(self.q.shape, q), ops.zeros(shape, k)
            self.d_w, self.d_beta = ops.zeros(shape, k), ops.zeros(shape[:3], k)
            self.d_keys, self.d_whole = ops.zeros(shape, k), ops.zeros(self.whole.shape, k)
            self.is_finished = False
        else:
            self.carried, self.next = ops.empty(shape, k), ops.empty(shape, k)
            self.at = 0

    def _at(self, a: int) -> Any:
        return at(a * self.size, (a + 1) * self.size)

    def _inverses(self) -> Array:
        """M of every chunk, all in one stack."""
        xp, (b, n, _, d) = namespace(self.w), self.w.shape
        w = xp.reshape(self.w, (b, n, self.chunks, self.size, d))
        beta = xp.reshape(self.beta, (b, n, self.chunks, self.size, 1))
        overlap = self.ops.product(beta * w, transpose(w))
        return unit_lower_inverse(self.ops, xp.tril(overlap, k=-1))

    def _chunk(self, a: int) -> Chunk:
        ops, xp = self.ops, namespace(self.k)
        k, w, beta = self.k[self._at(a)], self.w[self._at(a)], self.beta[self._at(a)][..., None]
        m = self.m[at_chunk(a)]
        r = xp.tril(ops.product(w, transpose(k)), k=-1)
        z = m * transpose(beta)
        return Chunk(k, w, beta, r, m, ops.product(z, r), ops.product(z, w))

    # ---------------------------------------------------------------------------- a strip

    def within(self) -> Array:
        """A_aa of every chunk, q being one query head (b, n, chunks, size, size)."""
        b, n, size = *self.k.shape[:2], self.size
        found = self.ops.empty((b, n, self.chunks, size, size), self.k)
        for a in range(self.chunks):
            chunk, q = self._chunk(a), self.q[:, :, 0, a * size : (a + 1) * size, :]
            found[at_chunk(a)] = self._local(chunk, q, self._seen(chunk, q))
        return found

    def _seen(self, chunk: Chunk, q: Array) -> Array:
        """B = tril(q wᵀ), of each query head's rows."""
        return self._lower(self.ops.product(q, transpose(chunk.w)))

    def _local(self, chunk: Chunk, q: Array, seen: Array) -> Array:
        """A_aa, right on and below the diagonal."""
        local = self.ops.product(q, transpose(chunk.k))
        return self.ops.add_product(local, seen, chunk.zr, -1.0)

    def _lower(self, x: Array) -> Array:
        """tril of each query head's rows (b, n, r size, size)."""
        xp = namespace(x)
        b, n, rows, size = x.shape
        each = xp.reshape(x, (b, n, rows // size, size, size))
        return xp.reshape(xp.tril(each), x.shape)

    def strip(self, i0: int, i1: int, low: int, high: int, room: Scratch) -> Array:
        a, ops = i0 // self.size, self.ops
        chunk = self._chunk(a)
        q = block_of_rows(self.q, a * self.size, (a + 1) * self.size)
        seen = self._seen(chunk, q)
        start = ops.add_product(q + 0, seen, chunk.zw, -1.0)  # Q̃
        shape = (*q.shape[:3], high - low)
        strip = room.shaped(shape)
        strip = ops.empty(shape, q) if strip is None else strip
        old = min(a * self.size, high)
        if self.gradient:
            self.now = (a, chunk, seen)
            self._strip_of_carried_queries(strip, a, start, low, old)
        else:
            self._carry_keys(a)
            if low < old:
                past = transpose(self.carried[at(low, old)])
                strip[..., : old - low] = ops.product(start, past)
            if high > old:
                self._carry(a, chunk)
        if high > old:
            strip[..., old - low :] = self._local(chunk, q, seen)[..., : high - old]
        if i1 - i0 == self.size:
            return strip
        xp, r = namespace(q), self.q.shape[2]
        each = xp.reshape(strip, (*q.shape[:2], r, self.size, high - low))
        return xp.reshape(each[:, :, :, : i1 - i0, :], (*q.shape[:2], r * (i1 - i0), high - low))

    def _carry_keys(self, a: int) -> None:
        """The keys in front of chunk a as its queries see them."""
        while self.at < a:
            self._carry(self.at, self._chunk(self.at))

    def _carry(self, a: int, chunk: Chunk) -> None:
        """The keys up to and with chunk a, as those behind it see them."""
        if self.at != a or a == self.chunks - 1:
            return
        old = a * self.size
        if old:
            whole = transpose(chunk.all(self.ops))
            self.next[at(0, old)] = self.ops.product(self.carried[at(0, old)], whole)
        self.next[self._at(a)] = chunk.keys(self.ops)
        self.carried, self.next = self.next, self.carried
        self.at += 1

    def _strip_of_carried_queries(
        self, strip: Array, a: int, start: Array, low: int, old: int
    ) -> None:
        self.x: dict[int, Array] = {}
        x = start
        for b in range(a - 1, low // self.size - 1, -1):
            self.x[b] = x
            first, last = max(b * self.size, low), min((b + 1) * self.size, old)
            keys = transpose(self.keys[at(first, last)])
            strip[..., first - low : last - low] = self.ops.product(x, keys)
            if b * self.size > low:
                x = self.ops.product(x, self.whole[at_chunk(b)])

    # ------------------------------------------------------------------------- its gradient

    def pull(self, i0: int, i1: int, low: int, high: int, d_strip: Array) -> None:
        (a, chunk, seen), size, ops = self.now, self.size, self.ops
        xp = namespace(d_strip)
        b, n, r = self.q.shape[:3]
        if i1 - i0 < size:
            d_strip = xp.reshape(d_strip, (b, n, r, i1 - i0, high - low))
            d_strip = padded(d_strip, 0, size - (i1 - i0), axis=3)
            d_strip = xp.reshape(d_strip, (b, n, r * size, high - low))
        old = min(a * size, high)
        q = block_of_rows(self.q, a * size, (a + 1) * size)
        d_q, d_seen = ops.zeros(q.shape, q), ops.zeros(seen.shape, q)
        d_zr, d_zw = ops.zeros(chunk.zr.shape, q), ops.zeros(chunk.zw.shape, q)
        if low < old:  # Q̃ = q − B (Z w)
            d_q = self._pull_past(low, old, d_strip)
            d_seen = ops.add_product(d_seen, d_q, transpose(chunk.zw), -1.0)
            d_zw = ops.add_product(d_zw, transpose(seen), d_q, -1.0)
        if high > old:  # A_aa = q kᵀ − B (Z R)
            d_local = padded(d_strip[..., old - low :], 0, size - (high - old), axis=3)
            d_q = ops.add_product(d_q, d_local, chunk.k)
            ops.add_product_at(self.d_k_padded, self._at(a), transpose(d_local), q)
            d_seen = ops.add_product(d_seen, d_local, transpose(chunk.zr), -1.0)
            d_zr = ops.add_product(d_zr, transpose(seen), d_local, -1.0)
        d_seen = self._lower(d_seen)
        d_q = ops.add_product(d_q, d_seen, chunk.w)
        ops.add_product_at(self.d_w, self._at(a), transpose(d_seen), q)
        self._pull_chunk(a, chunk, d_zr, d_zw)
        here = slice(a * size, (a + 1) * size)
        self.d_q_padded[:, :, :, here, :] = xp.reshape(d_q, (b, n, r, size, d_q.shape[3]))

    def _pull_past(self, low: int, old: int, d_strip: Array) -> Array:
        """dQ̃, from the scores with earlier chunks; their dK̃ and dP are added to."""
        ops, size = self.ops, self.size
        y: Array = None
        for c, x in sorted(self.x.items()):
            first, last = max(c * size, low), min((c + 1) * size, old)
            piece = d_strip[..., first - low : last - low]
            ops.add_product_at(self.d_keys, at(first, last), transpose(piece), x)
            d_x = ops.product(piece, self.keys[at(first, last)])
            if y is not None:
                ops.add_product_at(self.d_whole, at_chunk(c), transpose(x), y)
                d_x = ops.add_product(d_x, y, transpose(self.whole[at_chunk(c)]))
            y = d_x
        return y

    def _pull_chunk(self, a: int, chunk: Chunk, d_zr: Array, d_zw: Array) -> None:
        """From Z R and Z w to k, w and β."""
        xp, ops = namespace(self.k), self.ops
        m_t, here = transpose(chunk.m), self._at(a)
        z_t = chunk.beta * m_t
        d_z = ops.product(d_zr, transpose(chunk.r))
        d_z = ops.add_product(d_z, d_zw, transpose(chunk.w))
        d_r = xp.tril(ops.product(z_t, d_zr), k=-1)
        d_m = d_z * transpose(chunk.beta)
        d_scaled = -ops.product(m_t, ops.product(d_m, m_t))  # Of diag(β) stril(w wᵀ).
        overlap = xp.tril(ops.product(chunk.w, transpose(chunk.w)), k=-1)
        d_beta = xp.sum(chunk.m * d_z, axis=-2) + xp.sum(d_scaled * overlap, axis=-1)
        d_overlap = xp.tril(chunk.beta * d_scaled, k=-1)
        self.d_beta[here] = self.d_beta[here] + d_beta
        ops.add_product_at(self.d_k_padded, here, transpose(d_r), chunk.w)
        ops.add_product_at(self.d_w, here, z_t, d_zw)
        ops.add_product_at(self.d_w, here, d_r, chunk.k)
        ops.add_product_at(self.d_w, here, d_overlap + transpose(d_overlap), chunk.w)

    def _finish(self) -> None:
        """From K̃ and P of every chunk, to which later queries have added, to k, w and β."""
        if self.is_finished:
            return
        ops = self.ops
        for a in range(self.chunks):
            chunk, here = self._chunk(a), self._at(a)
            d_keys, d_whole = self.d_keys[here], self.d_whole[at_chunk(a)]
            self.d_k_padded[here] = self.d_k_padded[here] + d_keys
            ops.add_product_at(self.d_w, here, chunk.zr, d_keys, -1.0)
            ops.add_product_at(self.d_w, here, chunk.zw, transpose(d_whole), -1.0)
            d_zr = -ops.product(chunk.w, transpose(d_keys))
            self._pull_chunk(a, chunk, d_zr, -ops.product(chunk.w, d_whole))
        self.is_finished = True

    @property
    def d_q(self) -> Array:
        return self.d_q_padded[:, :, :, : self.length, :]

    @property
    def d_k(self) -> Array:
        self._finish()
        return self.d_k_padded[:, :, : self.length, :]

    def extra_gradients(self) -> tuple[Array, Array]:
        """dw (b, n, s, d) and dβ (b, n, s)."""
        self._finish()
        return self.d_w[:, :, : self.length, :], self.d_beta[:, :, : self.length]
