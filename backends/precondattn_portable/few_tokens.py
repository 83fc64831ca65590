"""The recurrence of few tokens from zero states, by all pairs of tokens.

    o_i = Σ_{j≤i,c} q_ic D_ijc k_jc u_j,    D_ijc = e^{g_{j+1,c} + … + g_ic},
    U = V  (additive),    (I + diag(β) stril(D ∘ A Kᵀ))⁻¹ β V  (delta rule)

In a full call the first state is 0 and the last one is discarded, so neither is computed, and there
are no chunks between which states are passed. Every exponent is the sum of its own gates, as in
`head_decay.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from precondattn.arrays import Array, Arrays, namespace
from precondattn.spec.array_functions import next_token, previous_token, transpose
from precondattn.spec.recurrence import AllTokens, ByTokens, Stream, erased
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.triangular_inverse import solve_unit_lower

TOKENS = 64
"""Tokens of the longest such call."""

ENTRIES = 2**16
"""Entries of D for all channels, in the largest such call: 256 KiB in float32."""

Known = dict[tuple[int, int, int], tuple[Array | None, Array]]
"""D and the scores by the identities of q, k and g."""


def is_few(x: Arrays) -> bool:
    """Whether a call has so few tokens that chunks would cost more than pairs."""
    b, s = x["k" if "k" in x else "v"].shape[:2]
    heads = max(x[name].shape[2] for name in ("q", "k", "v") if name in x)
    channels = x["g"].shape[3] if "g" in x and x["g"].ndim == 4 else 1
    few: bool = s <= TOKENS and b * heads * s * s * channels <= ENTRIES
    return few


def decay_of_pairs(ops: Arithmetic, g: Array) -> Array:
    """D (b, m, s, s, channels), 1 above the diagonal, from log-decays (b, m, s, …)."""
    xp = namespace(g)
    b, m, s = g.shape[:3]
    rows = xp.permute_dims(xp.reshape(g, (b, m, s, -1)), (0, 1, 3, 2))[..., None]
    # Column j accumulates the gates of the tokens after j.
    after = xp.tril(xp.broadcast_to(rows, (*rows.shape[:-1], s)), k=-1)
    decay = ops.exp(ops.accumulate(after, -2))
    return xp.permute_dims(decay, (0, 1, 3, 4, 2))


class FewTokens(AllTokens):
    """A `Form` of full calls (`precondattn.spec.recurrence`), which starts from zero states.

    It neither reads states nor computes new ones, and returns those that it is given.
    """

    def __init__(self, ops: Arithmetic, *, decays: bool) -> None:
        self.ops, self.decays = ops, decays

    def forward(self, x: Stream, state: Array) -> tuple[Array, Array]:
        return self._outputs(x, {}), state

    def read(
        self, streams: Sequence[tuple[Stream, Array]], function: ByTokens, *arrays: Array
    ) -> tuple[tuple[Array, ...], list[Array]]:
        known: Known = {}
        outputs = [self._outputs(x, known) for x, _ in streams]
        return function(*outputs, *arrays), [state for _, state in streams]

    def _outputs(self, x: Stream, known: Known) -> Array:
        """The outputs (b, m, t, r, e); `known` has D and scores that streams share."""
        xp, ops = namespace(x.k), self.ops
        (b, m, t, r, _), s = x.q.shape, x.k.shape[2]
        key = id(x.q), id(x.k), id(x.g)
        if key not in known:
            known[key] = self._pairs(x)
        decay, scores = known[key]
        u = x.v if x.beta is None else self._corrected(x, decay)
        if decay is None or x.g.shape[4] == 1:
            o = ops.product(xp.reshape(scores, (b, m, r * t, s)), u)
            return xp.permute_dims(xp.reshape(o, (b, m, r, t, o.shape[3])), (0, 1, 3, 2, 4))
        scores = xp.permute_dims(scores, (0, 1, 3, 2, 4))
        return scores @ (decay[:, :, s - t :, ...] * u[:, :, None, ...])

    def _pairs(self, x: Stream) -> tuple[Array | None, Array]:
        """D (b, m, s, s, 1 or d or e), and the scores (b, m, r, t, s) up to each query."""
        t, s = x.q.shape[2], x.k.shape[2]
        decay = decay_of_pairs(self.ops, x.g) if self.decays else None
        of_queries = decay if decay is None or t == s else decay[:, :, s - t :, ...]
        scores = self._scores(x.q, x.k, of_queries, x.g)
        # Rows before tokens, such that the last two axes are those of the triangle.
        scores = namespace(scores).permute_dims(scores, (0, 1, 3, 2, 4))
        return decay, self.ops.lower(scores, s - t)

    def _scores(self, rows: Array, k: Array, decay: Array | None, g: Array) -> Array:
        """Σ_c rows_ic D_ijc k_jc (b, m, t, r, s), of rows (b, m, t, r, d).

        If each value channel has a gate, D is left out.
        """
        xp, ops = namespace(k), self.ops
        (b, m, t, r, d), s = rows.shape, k.shape[2]
        if decay is not None and g.shape[3] > 1:
            return rows @ transpose(decay * k[:, :, None, ...])
        scores = ops.product(xp.reshape(rows, (b, m, t * r, d)), transpose(k))
        scores = xp.reshape(scores, (b, m, t, r, s))
        if decay is None or g.shape[4] > 1:
            return scores
        return ops.multiply(scores, decay[:, :, :, None, :, 0])

    def _corrected(self, x: Stream, decay: Array | None) -> Array:
        """The rows U of the delta rule."""
        assert x.beta is not None
        beta = x.beta[..., None]
        rows = erased(x) if x.undecayed is None else next_token(erased(x))
        among_keys = self._scores(rows[:, :, :, None, :], x.k, decay, x.g)[:, :, :, 0, :]
        if x.undecayed is not None:
            among_keys = previous_token(among_keys)
        strict = self.ops.multiply(self.ops.lower(among_keys, -1), beta)
        return solve_unit_lower(self.ops, strict, beta * x.v)
