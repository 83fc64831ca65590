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

In each direction, three products depend on the adjacent chunk. Where operations should be few, W =
M (reading ∘ β ∘ E) is computed in advance, and one product is left:

    S ← (total − (writing ∘ K)ᵀ W) S + (writing ∘ K)ᵀ M (β ∘ V).

With one decay for each key channel, the decay is a factor of the channels of a product and not of
the product, and total multiplies the rows of S: with F(A, x, y) of `channel_decay.py`,

    L = stril(dF/dA (E, K)),    A = dF/dA (Q, K).

In the gradient, dA and dL are the coefficients of one F, whose rows x are those of Q and E, so that
the decays of K are applied once.
"""

from __future__ import annotations

from functools import cached_property

from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import (
    identity_like,
    next_token,
    previous_token,
    row_sum,
    transpose,
)
from precondattn_portable.arithmetic import Arithmetic, product_at
from precondattn_portable.channel_decay import ChannelDecay
from precondattn_portable.chunkwise_additive import ChunkGroup, Gradients, WrittenChunks
from precondattn_portable.head_decay import HeadDecay, decayed, flat, summed_rows, sums_before
from precondattn_portable.triangular_inverse import unit_lower_inverse

MOST_STEPS = 8
"""The most steps between states that are computed one after the other where operations are few."""

Pulled = tuple[Array, Array, Array | None, Array]


def all_states(ops: Arithmetic, between: Array, added: Array, first: Array) -> Array:
    """S_0 = `first`, S_{i+1} = P_i S_i + A_i: (c + 1, n, d, e) from P (c, n, d, d) and A.

    Adjacent steps are joined until few are left, whose states are computed one after the other:

        S_{2i+2} = (P_{2i+1} P_{2i}) S_{2i} + P_{2i+1} A_{2i} + A_{2i+1}.
    """
    count = between.shape[0]
    states = ops.empty((count + 1, *first.shape), first)
    if count <= MOST_STEPS:
        states[0, ...] = first
        states[1:, ...] = added
        for i in range(count):
            ops.add_product_at(states, (i + 1, ...), between[i, ...], states[i, ...])
        return states
    paired = count - count % 2
    pairs = (_even_and_odd(ops, x[:paired, ...]) for x in (between, added))
    (p, later_p), (a, later_a) = pairs
    later_a = ops.add_product(later_a, later_p, a)
    even = all_states(ops, ops.product(later_p, p), later_a, first)
    states[0 : paired + 1 : 2, ...] = even
    states[1:paired:2, ...] = ops.add_product(a, p, even[:-1, ...])
    if paired < count:
        states[count, ...] = added[paired, ...]
        ops.add_product_at(states, (count, ...), between[paired, ...], states[paired, ...])
    return states


def _even_and_odd(ops: Arithmetic, x: Array) -> tuple[Array, Array]:
    """The arrays of even and of odd chunks, each contiguous in memory."""
    xp, half = namespace(x), x.shape[0] // 2
    both = ops.empty((2, half, *x.shape[1:]), x)
    both[...] = xp.permute_dims(xp.reshape(x, (half, 2, *x.shape[1:])), (1, 0, 2, 3, 4))
    return both[0, ...], both[1, ...]


class DeltaRule(ChunkGroup):
    """The delta rule with one decay for the whole state, or none.

    Delta, GatedDelta, Comba and DeltaProduct use it.
    """

    scores: Array
    """A (c, n, C r, C)"""
    d_right: Array
    """X"""

    def __init__(
        self, ops: Arithmetic, x: WrittenChunks, decay: HeadDecay | ChannelDecay | None = None
    ) -> None:
        super().__init__(ops, x, decay)
        self.beta: Array = x.beta
        self.among_keys = self._among_keys()
        """L (c, n, C, C)"""
        self.inverse = self._inverted(self.among_keys * self.beta)
        self.writing_k = decayed(x.k, self.decay.writing)
        self.reading_k = self._reading_k()

    def _among_keys(self) -> Array:
        decay = self.decay
        assert isinstance(decay, HeadDecay)
        is_late = self.x.undecayed is not None and self.x.g is not None
        self.below = previous_token(decay.pairs) if is_late else decay.pairs * decay.before
        products = self.ops.product(self.erase, transpose(self.x.k))
        return self.ops.multiply(products, self.below)

    def _reading_k(self) -> Array:
        """reading ∘ β ∘ E"""
        return self.erase * decayed(self.beta, self.to_erased)

    def _inverted(self, strict: Array) -> Array:
        """(I + strict)⁻¹"""
        return unit_lower_inverse(self.ops, strict)

    @property
    def erase(self) -> Array:
        """E (c, n, C, d)"""
        x = self.x
        if x.undecayed is not None:
            return x.undecayed
        return x.k if x.erase is None else x.erase

    @cached_property
    def to_erased(self) -> Array | None:
        """The factor `reading` for the rows of E."""
        g = self.x.g
        if self.x.undecayed is None or g is None:
            return self.decay.reading
        return namespace(g).exp(sums_before(g))

    def _at_gates(self, rows: Array) -> Array:
        """Rows of E, moved to the last token whose gate multiplies them."""
        return rows if self.x.undecayed is None else next_token(rows)

    @cached_property
    def among_states(self) -> tuple[Array, Array]:
        """W = M (reading ∘ β ∘ E), and the matrix between states, total − (writing ∘ K)ᵀ W."""
        ops = self.ops
        w = ops.product(self.inverse, self.reading_k)
        between = ops.product(transpose(self.writing_k), w)
        kept = identity_like(between) if self.total is None else self.total * identity_like(between)
        return w, ops.add(ops.multiply(between, -1.0), kept)

    def states(self, state: Array) -> Array:
        ops, x = self.ops, self.x
        right = x.v * self.beta
        if ops.sizes.few_operations:
            w, between = self.among_states
            u = ops.product(self.inverse, right)
            added = ops.product(transpose(self.writing_k), u)
            states = all_states(ops, between, added, state)
            self.u = ops.add_product(u, w, states[:-1, ...], -1.0)
            return states
        self.u = ops.empty(right.shape, right)
        states = ops.empty((x.k.shape[0] + 1, *state.shape), state)
        states[0, ...] = state
        for chunk in range(x.k.shape[0]):
            at, after = (chunk, ...), (chunk + 1, ...)
            ops.add_product_at(right, at, self.reading_k[at], states[at], -1.0)
            u = product_at(ops, self.u, at, self.inverse[at], right[at])
            product_at(ops, states, after, transpose(self.writing_k[at]), u)
            self._pass_on(states, chunk, chunk, chunk + 1)
        return states

    def d_states(self, q: Array, d_o: Array, d_state: Array) -> Array:
        ops, decay = self.ops, self.decay
        self.scores = decay.scores(q, self.x.k)
        d_u = ops.product(transpose(self.scores), flat(d_o))
        d_states = self._added_by_reads(decayed(q, decay.reading), d_o, d_state)
        if ops.sizes.few_operations:
            w, between = self.among_states
            ops.add_product_at(d_states, (slice(0, -1), ...), transpose(w), d_u, -1.0)
            xp = namespace(d_u)
            backward = xp.flip(transpose(between), axis=0), xp.flip(d_states[:-1, ...], axis=0)
            d_states = xp.flip(all_states(ops, *backward, d_state), axis=0)
            d_u = ops.add_product(d_u, self.writing_k, d_states[1:, ...])
            self.d_right = ops.product(transpose(self.inverse), d_u)
            return d_states
        self.d_right = ops.empty(d_u.shape, d_u)
        for chunk in range(self.x.k.shape[0] - 1, -1, -1):
            at, after = (chunk, ...), (chunk + 1, ...)
            ops.add_product_at(d_u, at, self.writing_k[at], d_states[after])
            right = product_at(ops, self.d_right, at, transpose(self.inverse[at]), d_u[at])
            self._pass_on(d_states, chunk, chunk + 1, chunk)
            ops.add_product_at(d_states, at, transpose(self.reading_k[at]), right, -1.0)
        return d_states

    def vjp(self, q: Array, d_o: Array, states: Array, d_states: Array) -> Gradients:
        ops, decay, x, d_right = self.ops, self.decay, self.x, self.d_right
        from_states = ops.product(d_right, transpose(states[:-1, ...]))
        if self.to_erased is not None:
            from_states = ops.multiply(from_states, self.to_erased)
        from_keys = decay.by_gate(from_states * self.erase)
        d_among = ops.product(d_right, transpose(self.u))
        products = d_among * self.among_keys
        d_beta = row_sum(d_right * x.v) - row_sum(from_keys) - row_sum(products)
        d_v = ops.multiply(d_right, self.beta)
        d_erase = ops.multiply(from_states, -self.beta)

        d_scores = ops.product(flat(d_o), transpose(self.u))
        d_q = decay.times_reading(d_o, transpose(states[:-1, ...]))
        d_k = decay.times_writing(self.u, transpose(d_states[1:, ...]))
        read = decay.by_gate(summed_rows(d_q * q)) - self._at_gates(self.beta * from_keys)
        written = decay.by_gate(d_k * x.k)
        d = (d_q, d_k, d_erase)
        d_q, d_k, d_erase, within = self._pull(q, d_scores, d_among, products, *d)
        d_g = decay.d_g(within, read, written, self._kept(states, d_states))
        if x.undecayed is None:
            return d_q, WrittenChunks(d_k, d_v, d_g, d_beta, d_erase)
        return d_q, WrittenChunks(d_k, d_v, d_g, d_beta, None, d_erase)

    def _pull(self, q: Array, d_scores: Array, among: Array, products: Array, *d: Array) -> Pulled:
        """The gradients of Q, K and E, added to others, and the sums that `ChunkDecay.d_g` needs.

        They are computed from dA, X Uᵀ and X Uᵀ ∘ L. If E is K, dE is None and is added to dK.
        """
        ops, x, (d_q, d_k, d_erase) = self.ops, self.x, d
        d_q, d_k, pairs = self.decay.pull(self.scores, d_scores, q, x.k, d_q, d_k)
        pairs = ops.add(pairs, self._at_gates(ops.multiply(products, -self.beta)))
        d_keys = ops.multiply(ops.multiply(among, -self.beta), self.below)
        if x.erase is None and x.undecayed is None:
            d_k = ops.add_product(ops.add(d_k, d_erase), d_keys + transpose(d_keys), x.k)
            return d_q, d_k, None, pairs
        d_k = ops.add_product(d_k, transpose(d_keys), self.erase)
        return d_q, d_k, ops.add_product(d_erase, d_keys, x.k), pairs


class KeyDeltaRule(DeltaRule):
    """The delta rule, with one decay for each key channel: KDA, GDN2, DPLR."""

    kind = ChannelDecay
    shared = -1
    decay: ChannelDecay

    def _among_keys(self) -> Array:
        self.rows = self._at_gates(self.erase)[:, :, :, None, :]
        if self.x.undecayed is None:
            return self.decay.scores(self.rows, self.x.k, diagonal=False)
        return previous_token(self.decay.scores(self.rows, self.x.k))

    def _reading_k(self) -> Array:
        return self.erase * self.to_erased * self.beta

    def _pull(self, q: Array, d_scores: Array, among: Array, products: Array, *d: Array) -> Pulled:
        xp, ops, x, r, (d_q, d_k, d_erase) = namespace(q), self.ops, self.x, q.shape[3], d
        d_scores = xp.reshape(d_scores, (*q.shape[:4], -1))
        d_among = self._at_gates(ops.lower(ops.multiply(among, -self.beta), -1))
        coefficients = xp.concat([d_scores, d_among[:, :, :, None, :]], axis=3)
        rows = xp.concat([q, self.rows], axis=3)
        d_rows, more_k, d_g = self.decay.gradients(flat(coefficients), rows, x.k)
        d_q, d_k = ops.add(d_q, d_rows[:, :, :, :r, :]), ops.add(more_k, d_k)
        d_rows = d_rows[:, :, :, r, :]
        d_erase = ops.add(d_erase, d_rows if x.undecayed is None else previous_token(d_rows))
        if x.erase is None and x.undecayed is None:
            return d_q, ops.add(d_k, d_erase), None, d_g
        return d_q, d_k, d_erase, d_g
