"""Reads and writes of chunks by the delta rule with one decay for each key channel.

The equations of `chunkwise_delta.py`, in which the decay is a factor of the channels of a product
and not of the product: with F(A, x, y) of `channel_decay.py`,

    L = stril(dF/dA (E, K)),    A = dF/dA (Q, K),
    U = M (β ∘ (V − (reading ∘ E) S)),    O = (reading ∘ Q) S + A U,
    S ← total ∘ S + (writing ∘ K)ᵀ U

where total multiplies the rows of S. In the gradient, dA and dL are the coefficients of one F,
whose rows x are those of Q and E, so that the decays of K are applied once.
"""

from __future__ import annotations

from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import previous_token, row_sum, transpose
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.channel_decay import ChannelDecay
from precondattn_portable.chunkwise_additive import WrittenChunks, flat, summed_rows
from precondattn_portable.chunkwise_delta import DeltaRule
from precondattn_portable.head_decay import decayed, sums_before, sums_from
from precondattn_portable.triangular_inverse import unit_lower_inverse


class KeyDeltaRule(DeltaRule):
    """The delta rule, with one decay for each key channel: KDA, GDN2, DPLR."""

    decay: ChannelDecay  # type: ignore[assignment]

    def __init__(self, ops: Arithmetic, x: WrittenChunks) -> None:
        self.ops, self.x = ops, x
        self._set(ChannelDecay(ops, x.g))
        self.inverse = unit_lower_inverse(ops, self.among_keys * x.beta)

    def _set(self, decay: ChannelDecay) -> None:
        """What follows from the decay."""
        self.decay = decay
        self.total = transpose(decay.total)
        self.rows = self._at_gates(self.erase)[:, :, :, None, :]
        if self.x.undecayed is None:
            self.among_keys = decay.scores(self.rows, self.x.k, diagonal=False)
            self.to_erased = decay.reading
        else:
            self.among_keys = previous_token(decay.scores(self.rows, self.x.k))
            self.to_erased = namespace(decay.g).exp(sums_before(decay.g))
        self.writing_k = self.x.k * decay.writing
        self.reading_k = self.erase * self.to_erased * self.x.beta

    def _kept(self, chunk: int) -> Array:
        return self.total[chunk, ...]

    def _scores(self, q: Array) -> Array:
        return self.decay.scores(q, self.x.k)

    def read(self, q: Array, states: Array) -> Array:
        o = self.ops.product(flat(decayed(q, self.decay.reading)), states[:-1, ...])
        o = self.ops.add_product(o, self._scores(q), self.u)
        return namespace(o).reshape(o, (*q.shape[:-1], o.shape[-1]))

    def vjp(
        self, q: Array, d_o: Array, states: Array, d_states: Array
    ) -> tuple[Array, WrittenChunks]:
        xp, ops, decay, x = namespace(q), self.ops, self.decay, self.x
        assert x.beta is not None
        size, r = q.shape[2:4]
        d_right = self.d_right  # X
        from_states = ops.product(d_right, transpose(states[:-1, ...]))
        from_states = ops.multiply(from_states, self.to_erased)
        from_keys = from_states * self.erase
        among = ops.product(d_right, transpose(self.u))
        d_beta = row_sum(d_right * x.v) - row_sum(from_keys) - row_sum(among * self.among_keys)
        d_v = ops.multiply(d_right, x.beta)

        d_scores = ops.product(flat(d_o), transpose(self.u))
        d_scores = xp.reshape(d_scores, (*q.shape[:4], size))
        d_among = self._at_gates(ops.lower(ops.multiply(among, -x.beta), -1))
        coefficients = xp.concat([d_scores, d_among[:, :, :, None, :]], axis=3)
        rows = xp.concat([q, self.rows], axis=3)
        d_rows, d_k, d_g = decay.gradients(flat(coefficients), rows, x.k)

        read = xp.reshape(ops.product(flat(d_o), transpose(states[:-1, ...])), q.shape)
        read = ops.multiply(read, decay.reading[..., None, :])
        written = ops.product(self.u, transpose(d_states[1:, ...]))
        written = ops.multiply(written, decay.writing)
        through_read = summed_rows(read * q) - self._at_gates(x.beta * from_keys)
        d_g = ops.add(d_g, sums_from(through_read))
        d_g = ops.add(d_g, sums_before(written * x.k))
        overlap = xp.sum(states[:-1, ...] * d_states[1:, ...], axis=-1)[:, :, None, :]
        d_g = ops.add(d_g, overlap * decay.total)

        d_k = ops.add(d_k, written)
        d_rows_of_erased = d_rows[:, :, :, r, :]
        if x.undecayed is not None:
            d_rows_of_erased = previous_token(d_rows_of_erased)
        d_erase = ops.add(ops.multiply(from_states, -x.beta), d_rows_of_erased)
        if x.erase is None and x.undecayed is None:
            d_k, d_erase = ops.add(d_k, d_erase), None
        d_q = ops.add(read, d_rows[:, :, :, :r, :])
        return d_q, self._gradients(d_k, d_v, d_g, d_beta, d_erase)
