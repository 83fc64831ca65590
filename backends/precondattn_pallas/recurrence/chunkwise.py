"""The recurrence of linear attention and the delta rule in chunks, by Pallas kernels.

    U = M β (V − reading ∘ E S)  (additive: U = V),    O = reading ∘ Q S + (D ∘ Q Kᵀ) U,
    S ← total ∘ S + (writing ∘ K)ᵀ U

with D and the factors of `chunk_tiles.py` and M of `delta_rule.py`; E are the keys that are erased,
K unless others are given. They may be erased from the state before its decay; reading of token i is
then that of token i − 1. With one decay for each channel, see `channel_recurrence.py`. Chunks are
prepared all at once (`delta_rule.py`), states are passed from chunk to chunk (`chunk_states.py`),
and outputs are read all at once (`chunk_reads.py`). The gradient recomputes the states, propagates
their gradients back, and computes the rest for all chunks at once (`chunk_gradient.py`). XLA
computes the factors of the gates, and the gradient of the gates from sums that the kernels return
(`gate_sums.py`).

Besides inputs, outputs and their gradients, memory holds a state of d e numbers in float32 for each
chunk, and M and two rows of numbers for each token; in the gradient, twice that and a few rows.
"""

from __future__ import annotations

import jax.numpy as jnp

from precondattn.arrays import Array, Arrays, DType
from precondattn.spec.recurrence import AllTokens, Stream, StreamGradients
from precondattn_pallas.precision import Products
from precondattn_pallas.recurrence import (
    channel_recurrence,
    chunk_gradient,
    chunk_reads,
    chunk_states,
    delta_rule,
)
from precondattn_pallas.recurrence.chunk_arrays import (
    ChunkPlan,
    padded_state,
    padded_values,
    plan_of,
    queries_of,
    rows_of,
    unpadded,
    unpadded_queries,
)
from precondattn_pallas.recurrence.gate_sums import by_next, d_gates


class Chunkwise(AllTokens):
    """A `Form` of the recurrence (`precondattn.spec.recurrence`).

    Products of queries, keys and values are in a given dtype; `decays` says whether there are
    gates.
    """

    def __init__(self, products: Products, dtype: DType, *, decays: bool) -> None:
        self.products, self.dtype, self.decays = products, dtype, decays

    def _states(self, x: Stream, state: Array) -> tuple[ChunkPlan, Arrays, Array, Array, Array]:
        """The plan, the rows, the states before every chunk and after the last, and U."""
        plan = plan_of(self.products, *state.shape[2:])
        rows = rows_of(x, plan, self.dtype, decays=self.decays)
        if x.beta is not None:
            rows |= delta_rule.prepared(plan, rows)
        return plan, rows, *chunk_states.states(plan, rows, padded_state(state))

    def forward(self, x: Stream, state: Array) -> tuple[Array, Array]:
        if max(x.g.shape[3:]) > 1:
            return channel_recurrence.forward(self.products, self.dtype, x, state)
        plan, rows, states, final, u = self._states(x, state)
        o = chunk_reads.outputs(plan, rows, states, u)
        return unpadded_queries(o, x, x.v.shape[3]), unpadded(final, state)

    def vjp(self, x: Stream, state: Array, d_o: Array, d_final: Array) -> StreamGradients:
        if max(x.g.shape[3:]) > 1:
            return channel_recurrence.vjp(self.products, self.dtype, x, state, d_o, d_final)
        plan, rows, states, _, u = self._states(x, state)
        (s, e), tokens = x.v.shape[2:], rows["k"].shape[1]
        d_o = queries_of(d_o, s, tokens, padded_values(e)).astype(self.dtype)
        local = chunk_reads.d_written(plan, rows, d_o)
        d_states, d_start, d_u = chunk_states.d_states(
            plan, rows, d_o, local, padded_state(d_final)
        )

        of_scores = chunk_gradient.of_scores(plan, rows, u, d_o)
        rows["d_scores"] = of_scores["d_scores"]
        d_v, of_delta_rule = d_u, {}
        if x.beta is not None:
            of_delta_rule = delta_rule.d_written(plan, rows, u, d_u)
            rows |= {name: of_delta_rule[name] for name in ("d_right", "d_keys")}
            d_v = rows["beta"][..., None] * of_delta_rule["d_right"]
        by_queries = chunk_gradient.of_queries(plan, rows, d_o, states)
        of_keys = chunk_gradient.of_keys(plan, rows, states, u, d_states)

        d_g = jnp.zeros_like(x.g)
        if self.decays:
            crossing = jnp.sum(of_scores["crossing"], axis=1)
            reads = jnp.sum(by_queries["read"], axis=1)
            if x.beta is not None:
                crossing = crossing + of_delta_rule["crossing"]
                erased = rows["beta"] * of_keys["from_keys"]
                reads = reads - (by_next(erased, plan.chunk) if "erasing" in rows else erased)
            kept = jnp.sum(of_keys["overlap"] * rows["total"], axis=2)
            d_g = unpadded(d_gates(crossing, reads, of_keys["written"], kept, plan.chunk), x.g)
        d_beta = d_erase = None
        if x.beta is not None:
            d_beta = unpadded(of_delta_rule["d_beta"] - of_keys["from_keys"], x.beta)
        if "d_erase" in of_keys:
            d_erase = unpadded(of_keys["d_erase"], x.k)
        stream = Stream(
            unpadded_queries(by_queries["d_q"], x, x.k.shape[3]),
            unpadded(of_keys["d_k"], x.k),
            unpadded(d_v, x.v),
            d_g,
            d_beta,
            None if x.erase is None else d_erase,
            None if x.undecayed is None else d_erase,
        )
        return StreamGradients(stream, unpadded(d_start, d_final))
