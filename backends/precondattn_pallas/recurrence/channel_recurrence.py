"""The recurrence in chunks with one decay for each key channel, or for each value channel.

    O = (reading ∘ Q) S + A U,      S ← total ∘ S + (writing ∘ K)ᵀ U,
    dQ = reading ∘ dO Sᵀ + dF/dQ,   dK = writing ∘ U dSᵀ + dF/dK,
    dU = Aᵀ dO + (writing ∘ K) dS,  dS ← total ∘ dS + (reading ∘ Q)ᵀ dO

with one decay for each row of the state, A = dF/dA from `channel_decay.py`, and F's other
derivatives at A = tril(dO Uᵀ). In an additive recurrence U = V. By the delta rule U and its
gradient are those of `delta_rule.py`, with L = stril(dF/dA) of the keys E that are erased and K,
and F(dL, E, K) is one more such term:

    dE = dF/dE − β ∘ reading ∘ X Sᵀ,    dK = … + dF/dK.

F(dO Vᵀ, Q, K) is linear in each of Q, K, V and dO. With one decay for each column of the state it
is F(Q Kᵀ, dO, V): the same equations on the transposed state, with Q and dO exchanged, and K and V
exchanged. Their dQ is then the output.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from precondattn.arrays import Array, DType
from precondattn.spec.recurrence import Stream, StreamGradients
from precondattn_pallas.precision import Products
from precondattn_pallas.recurrence import chunk_gradient, chunk_reads, chunk_states, delta_rule
from precondattn_pallas.recurrence.channel_decay import (
    gradients_of_channels,
    read_of_channels,
    scores_of_channels,
)
from precondattn_pallas.recurrence.chunk_arrays import (
    ChunkPlan,
    Rows,
    padded_state,
    padded_values,
    plan_of,
    queries_of,
    unpadded,
    unpadded_queries,
    written_of,
)
from precondattn_pallas.recurrence.gate_sums import d_gates


class ChannelArrays(NamedTuple):
    """Arrays of a call in the roles of the equations above."""

    plan: ChunkPlan
    rows: Rows
    """Rows per token by name, with q where there are queries."""
    d_o: Array
    """(m, r, T, e), or None."""
    is_exchanged: bool

    def state(self, state: Array) -> Array:
        """A state (b, m, d, e) in the layout of the rows."""
        return padded_state(_transposed(state) if self.is_exchanged else state)

    def of_state(self, state: Array, like: Array) -> Array:
        """A state in the layout of the rows, as (b, m, d, e)."""
        if self.is_exchanged:
            return _transposed(unpadded(state, _transposed(like)))
        return unpadded(state, like)


def forward(products: Products, dtype: DType, x: Stream, state: Array) -> tuple[Array, Array]:
    """The final state and the outputs, as `precondattn.spec.recurrence.Form` defines them."""
    problem = _problem(products, dtype, x, None)
    plan, rows, d_o, is_exchanged = problem
    states, final, u = chunk_states.states(plan, rows, problem.state(state))
    if is_exchanged:
        result = read_of_channels(plan, rows, _pairs(plan, rows, d_o, u))
        o = result + _from_states(plan, rows, d_o, states)
    else:
        o = chunk_reads.outputs(plan, _with_scores(plan, rows), states, u)
    return unpadded_queries(o, x, x.v.shape[3]), problem.of_state(final, state)


def vjp(
    products: Products, dtype: DType, x: Stream, state: Array, d_o: Array, d_final: Array
) -> StreamGradients:
    """The gradients, as `precondattn.spec.recurrence.Form` defines them."""
    problem = _problem(products, dtype, x, d_o)
    plan, rows, d_rows, is_exchanged = problem
    states, _, u = chunk_states.states(plan, rows, problem.state(state))
    rows = _with_scores(plan, rows)
    local = chunk_reads.d_written(plan, rows, d_rows)
    d_states, d_start, d_v = chunk_states.d_states(
        plan, rows, d_rows, local, problem.state(d_final)
    )
    d_q, d_k, d_g = gradients_of_channels(plan, rows, _pairs(plan, rows, d_rows, u))

    from_states = _from_states(plan, rows, d_rows, states)
    of_keys = chunk_gradient.of_keys(plan, {"k": rows["k"]}, states, u, d_states)
    written = rows["writing"] * of_keys["d_k"]
    kept = of_keys["overlap"] * rows["total"]
    reads = jnp.sum(from_states * rows["q"], axis=1)
    d_q, d_k = d_q + from_states, d_k + written
    d_beta = d_erase = None
    if x.beta is not None:
        d_erase, d_k, d_g, reads, d_v, d_beta = _of_delta_rule(
            plan, rows, states, u, d_v, (d_k, d_g, reads)
        )
    d_g = d_gates(d_g, reads, written * rows["k"], kept, plan.chunk)
    if is_exchanged:
        d_q = chunk_reads.outputs(plan, rows, states, u)
        d_k, d_v = d_v, d_k
    if d_erase is not None and x.erase is None:
        d_k, d_erase = d_k + d_erase, None
    (d, e), s = state.shape[2:], x.k.shape[2]
    stream = Stream(
        unpadded_queries(d_q, x, d),
        unpadded(d_k, x.k),
        unpadded(d_v, x.v),
        d_g[:, :s, : e if is_exchanged else d].reshape(x.g.shape),
        None if d_beta is None else unpadded(d_beta, x.beta),
        None if d_erase is None else unpadded(d_erase, x.k),
    )
    return StreamGradients(stream, problem.of_state(d_start, d_final))


def _of_delta_rule(
    plan: ChunkPlan,
    rows: Rows,
    states: Array,
    u: Array,
    d_u: Array,
    others: tuple[Array, Array, Array],
) -> tuple[Array, ...]:
    """dE, the terms to add to (dK, dg of pairs, reads of the state), dV and dβ."""
    d_k, d_g, reads = others
    of_pairs = delta_rule.d_written(plan, rows, u, d_u)
    erased = _erased(rows)
    pairs = of_pairs["d_keys"][:, None]
    d_erase, d_k_of_pairs, d_g_of_pairs = gradients_of_channels(
        plan, {**rows, "q": erased[:, None]}, pairs
    )
    right, beta = of_pairs["d_right"], rows["beta"][..., None]
    from_state = _from_states(plan, rows, right[:, None], states)[:, 0]
    from_keys = from_state * erased
    return (
        d_erase[:, 0] - beta * from_state,
        d_k + d_k_of_pairs,
        d_g + d_g_of_pairs,
        reads - beta * from_keys,
        beta * right,
        of_pairs["d_beta"] - jnp.sum(from_keys, axis=2),
    )


def _erased(rows: Rows) -> Array:
    """The keys that are erased (m, T, d)."""
    return rows.get("erase", rows["k"])


def _problem(products: Products, dtype: DType, x: Stream, d_o: Array) -> ChannelArrays:
    is_exchanged = x.g.shape[4] > 1
    if is_exchanged and x.beta is not None:
        raise ValueError("the delta rule has one decay for each key channel; found one by values")
    q, k, v, g = x.q, x.k, x.v, x.g
    if is_exchanged:
        q, d_o, k, v, g = d_o, q, v, k, _transposed(g)
    (s, d), e = k.shape[2:], v.shape[3]
    plan = plan_of(products, d, e, "channel_states")
    rows = written_of(x._replace(k=k, v=v, g=g), plan, dtype, decays=True)
    if x.beta is not None:
        of_erased = {**rows, "q": _erased(rows)[:, None]}
        rows["among"] = scores_of_channels(plan, of_erased)[:, 0]
        rows |= delta_rule.prepared(plan, rows)
    tokens, width = rows["k"].shape[1:]
    if q is not None:
        rows["q"] = queries_of(q, s, tokens, width).astype(dtype)
    if d_o is not None:
        d_o = queries_of(d_o, s, tokens, padded_values(e)).astype(dtype)
    return ChannelArrays(plan, rows, d_o, is_exchanged)


def _with_scores(plan: ChunkPlan, rows: Rows) -> Rows:
    return {**rows, "scores": scores_of_channels(plan, rows)}


def _pairs(plan: ChunkPlan, rows: Rows, d_o: Array, u: Array) -> Array:
    """tril(dO Uᵀ) (m, r, T, C)."""
    return chunk_gradient.of_scores(plan, {"k": rows["k"]}, u, d_o)["d_scores"]


def _from_states(plan: ChunkPlan, rows: Rows, d_o: Array, states: Array) -> Array:
    """reading ∘ dO Sᵀ (m, r, T, d)."""
    result = chunk_gradient.of_queries(plan, rows, d_o, states)["d_q"]
    return result * rows["reading"][:, None]


def _transposed(array: Array) -> Array:
    return jnp.swapaxes(array, -1, -2)
