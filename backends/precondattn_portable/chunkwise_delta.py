"""Reads and writes of chunks by the delta rule, and their gradients.

    M = (I + diag(β) L)⁻¹,  L = stril(D ∘ E Kᵀ),    U = M (β ∘ (V − reading ∘ E S)),
    O = reading ∘ Q S + (D ∘ Q Kᵀ) U,               S ← total S + (writing ∘ K)ᵀ U

with D and the other factors from `head_decay.py`, and E the keys that are erased: K, unless others
are given. Gradients, with dS that of the state after the chunk, A = D ∘ Q Kᵀ, and dA as for
additive states:

    dU = Aᵀ dO + (writing ∘ K) dS,    X = Mᵀ dU,    dV = β ∘ X,
    dL = −stril((β ∘ X) Uᵀ),          dβ = Σ X ∘ (V − reading ∘ E S − L U),
    dK = dAᵀ Q + (dL ∘ D)ᵀ E + writing ∘ U dSᵀ,
    dE = (dL ∘ D) K − reading ∘ β ∘ X Sᵀ,    and added to dK where E is K,
    dS ← total dS + (reading ∘ Q)ᵀ dO − (reading ∘ β ∘ E)ᵀ X.

Where E is erased from the undecayed state, its rows are those of the token before: L has D_{i−1,j}
and `reading` is that of i − 1. Their part of the gates' gradient is then that of token i − 1.

In each direction, three products depend on the adjacent chunk. (Computing M (β ∘ reading ∘ K) in
advance would leave two, but costs one more product.)
"""

from __future__ import annotations

from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import next_token, previous_token, row_sum, transpose
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.chunkwise_additive import (
    ChunkGroup,
    WrittenChunks,
    d_of_read,
    d_of_written,
    flat,
    kept,
    pulled,
    read,
    summed_pairs,
)
from precondattn_portable.head_decay import HeadDecay, decayed, sums_before
from precondattn_portable.in_place import add_kept_at, product_at
from precondattn_portable.triangular_inverse import unit_lower_inverse


class DeltaRule(ChunkGroup):
    """The delta rule with one decay for the whole state, or none.

    Delta, GatedDelta, Comba and DeltaProduct use it.
    """

    u: Array
    scores: Array
    d_right: Array

    def __init__(self, ops: Arithmetic, x: WrittenChunks) -> None:
        self.ops, self.x = ops, x
        self.decay = HeadDecay(ops, x.g, x.k)
        self.below, self.to_erased = self._of_erased()
        self.among_keys = ops.multiply(ops.product(self.erase, transpose(x.k)), self.below)
        self.inverse = unit_lower_inverse(ops, self.among_keys * x.beta)
        self.writing_k = decayed(x.k, self.decay.writing)
        self.reading_k = self.erase * decayed(x.beta, self.to_erased)

    @property
    def erase(self) -> Array:
        """E (c, n, C, d)"""
        x = self.x
        if x.undecayed is not None:
            return x.undecayed
        return x.k if x.erase is None else x.erase

    def _of_erased(self) -> tuple[Array, Array | None]:
        """stril(D), and `reading`, for the rows of E."""
        decay, g = self.decay, self.x.g
        if self.x.undecayed is None or g is None:
            return decay.pairs * decay.before, decay.reading
        return previous_token(decay.pairs), namespace(g).exp(sums_before(g))

    def _at_gates(self, rows: Array) -> Array:
        """Rows of E at the last token whose gate they are multiplied by."""
        return rows if self.x.undecayed is None else next_token(rows)

    def states(self, state: Array) -> Array:
        ops, x = self.ops, self.x
        right = x.v * x.beta
        self.u = ops.empty(right.shape, right)
        states = ops.empty((x.k.shape[0] + 1, *state.shape), state)
        states[0, ...] = state
        for chunk in range(x.k.shape[0]):
            here, after = (chunk, ...), (chunk + 1, ...)
            ops.add_product_at(right, here, self.reading_k[here], states[here], -1.0)
            u = product_at(ops, self.u, here, self.inverse[here], right[here])
            product_at(ops, states, after, transpose(self.writing_k[here]), u)
            add_kept_at(ops, states, after, states[here], self._kept(chunk))
        return states

    def d_states(self, q: Array, d_o: Array, d_state: Array) -> Array:
        ops, decay = self.ops, self.decay
        self.scores = self._scores(q)
        d_u = ops.product(transpose(self.scores), flat(d_o))
        self.d_right = ops.empty(d_u.shape, d_u)
        d_states = pulled(ops, decayed(q, decay.reading), d_o, d_state)
        for chunk in range(self.x.k.shape[0] - 1, -1, -1):
            here, after = (chunk, ...), (chunk + 1, ...)
            ops.add_product_at(d_u, here, self.writing_k[here], d_states[after])
            right = product_at(ops, self.d_right, here, transpose(self.inverse[here]), d_u[here])
            add_kept_at(ops, d_states, here, d_states[after], self._kept(chunk))
            ops.add_product_at(d_states, here, transpose(self.reading_k[here]), right, -1.0)
        return d_states

    def read(self, q: Array, states: Array) -> Array:
        return read(self.ops, self.decay, q, states, self._scores(q), self.u)

    def _kept(self, chunk: int) -> Array | None:
        """The factor of the state over a chunk; None for 1."""
        return self.decay.kept(chunk)

    def _scores(self, q: Array) -> Array:
        """A (c, n, C r, C)"""
        return self.decay.among(self.ops.product(flat(q), transpose(self.x.k)))

    def vjp(
        self, q: Array, d_o: Array, states: Array, d_states: Array
    ) -> tuple[Array, WrittenChunks]:
        ops, decay, x = self.ops, self.decay, self.x
        assert x.beta is not None
        d_scores = ops.product(flat(d_o), transpose(self.u))
        pairs = ops.multiply(self.scores, d_scores)
        d_scores = decay.among(d_scores)
        d_q, through_read = d_of_read(ops, decay, q, d_o, states)
        d_q = ops.add_product(d_q, d_scores, x.k)
        d_k, written = d_of_written(ops, decay, x.k, self.u, d_states)
        d_k = ops.add_product(d_k, transpose(d_scores), flat(q))

        d_right = self.d_right  # X
        from_states = ops.product(d_right, transpose(states[:-1, ...]))
        if self.to_erased is not None:
            from_states = ops.multiply(from_states, self.to_erased)
        among = ops.product(d_right, transpose(self.u))
        from_keys = row_sum(from_states * self.erase)
        products = among * self.among_keys
        d_beta = row_sum(d_right * x.v) - from_keys - row_sum(products)

        d_v = ops.multiply(d_right, x.beta)
        d_erase = ops.multiply(from_states, -x.beta)
        d_keys = ops.multiply(ops.multiply(among, -x.beta), self.below)
        if x.erase is None and x.undecayed is None:
            d_k, d_erase = ops.add(d_k, d_erase), None
            d_k = ops.add_product(d_k, d_keys + transpose(d_keys), x.k)
        else:
            d_erase = ops.add_product(d_erase, d_keys, x.k)
            d_k = ops.add_product(d_k, transpose(d_keys), self.erase)

        pairs = ops.add(summed_pairs(pairs), self._at_gates(ops.multiply(products, -x.beta)))
        through_read = through_read - self._at_gates(x.beta * from_keys)
        d_g = decay.d_g(pairs, through_read, written, kept(decay, states, d_states))
        d_q = namespace(d_q).reshape(d_q, q.shape)
        return d_q, self._gradients(d_k, d_v, d_g, d_beta, d_erase)

    def _gradients(
        self, d_k: Array, d_v: Array, d_g: Array, d_beta: Array, d_erase: Array | None
    ) -> WrittenChunks:
        if self.x.undecayed is None:
            return WrittenChunks(d_k, d_v, d_g, d_beta, d_erase)
        return WrittenChunks(d_k, d_v, d_g, d_beta, None, d_erase)
