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
from precondattn.spec.array_functions import previous_token
from precondattn_portable.channel_decay import ChannelDecay
from precondattn_portable.chunkwise_delta import DeltaRule
from precondattn_portable.head_decay import flat


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

    def _pull(
        self, q: Array, d_scores: Array, among: Array, products: Array, *d: Array
    ) -> tuple[Array, Array, Array | None, Array]:
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
