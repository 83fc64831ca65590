"""RWKV-6: gated linear attention that reads the state before a token, and the token with a bonus.

    o_t = s S_{t−1}ᵀ q_t + s (q_t · (u ∘ k_t)) v_t,    S_t = diag(e^{g_t}) S_{t−1} + k_t v_tᵀ

Source: RWKV-6 (arXiv 2404.05892) 4.2, where q is r, and e^g is w. The state before token t is
that after token t − 1. So what token t reads is what gated linear attention outputs at the token
before, for the query q_t; only the first token reads the initial state:

    o_{t+1} = S_tᵀ q'_t + …,    q'_t = s q_{t+1},    o_1 = s S_0ᵀ q_1 + ….

No gate is divided by: the decay between a query and the state before its token has no g_t. At the
first token of a packed segment q' is 0. Gradient: that of gated linear attention, one token later,
and of the first read dq_1 = s S_0 do_1, dS_0 += s q_1 do_1ᵀ. With c_t = q_t · (u ∘ k_t), the bonus
has

    dc_t = s v_t·do_t,    dv_t = s c_t do_t,
    dq_t = dc_t u ∘ k_t,    dk_t = dc_t u ∘ q_t,    du = Σ_t dc_t q_t ∘ k_t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Inputs, Recurrence
from precondattn.arrays import TIME, arange_like, namespace
from precondattn.cache import Slot
from precondattn.frame import Frame
from precondattn.frameworks.types import Array, Arrays, ByName
from precondattn.spec.array_functions import (
    after_zeros,
    next_token,
    previous_token,
    row_sum,
)
from precondattn.spec.linear_family import (
    LinearFamily,
    queries_of_rows,
    queries_of_states,
    rows_of_states,
    where_same_segment,
)
from precondattn.spec.recurrence import Form, Stream, StreamGradients


@dataclass(frozen=True)
class RWKV6(LinearFamily):
    """RWKV-6: o_i = s Σ_{j<i} Σ_c q_ic k_jc e^{g_{j+1,c} + … + g_{i−1,c}} v_j, and a bonus.

    The bonus is s (q_i · (u ∘ k_i)) v_i: `u` (h, d) weighs the channels of the token's own key.
    Keys, values and gates may have fewer heads than queries (n < h). There is one state per
    key/value head.

    Source: RWKV-6 (arXiv 2404.05892), 4.2.

    Parameters
    ----------
    scale : float, optional
        The scale s; d^{-1/2} by default. The published layer has 1.

    Examples
    --------
    With gates of 0 and a bonus of 1 it is linear attention:

    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
    >>> bool(np.allclose(pa.RWKV6()(q, k, v, g=0 * k, u=np.ones((2, 4))), pa.Linear()(q, k, v)))
    True
    """

    name: ClassVar[str] = "rwkv6"
    variants: ClassVar[tuple[str, ...]] = ("rwkv6[scale=1]",)
    declares = Recurrence("add", gate="channel", reads="before, with a bonus")

    @property
    def inputs(self) -> Inputs:
        return Inputs(**super().inputs, u="h d")

    def slots(self) -> tuple[Slot, ...]:
        return (Slot("state", "rwkv6.state({k}, {v}, {g})", "b n d e", wide=True, symbol="S"),)

    computes_with_states = True

    def run(self, state: ByName, x: ByName, frame: Frame, form: Form) -> tuple[Array, Arrays]:
        stream = self.stream(x, frame)
        o, final = read_before(form, stream, state["state"], frame)
        k, v = _own_rows(stream)
        bonus = row_sum(stream.q * bonus_of(x, stream.k.shape[1]) * k) * v
        return rows_of_states(o + bonus), {"state": final}

    def run_vjp(
        self, state: ByName, x: ByName, frame: Frame, cotangent: Array, d_state: ByName, form: Form
    ) -> tuple[Arrays, Arrays]:
        xp, stream = namespace(cotangent), self.stream(x, frame)
        d_o = queries_of_states(cotangent, stream.k.shape[1])
        d = read_before_vjp(form, stream, state["state"], d_o, d_state["state"], frame)

        q, (k, v), u, s = (
            stream.q,
            _own_rows(stream),
            bonus_of(x, stream.k.shape[1]),
            stream.k.shape[TIME],
        )
        c, d_c = row_sum(q * u * k), row_sum(d_o * v)
        d_stream = d.stream._replace(
            q=d.stream.q + d_c * u * k,
            k=d.stream.k + after_zeros(xp.sum(d_c * u * q, axis=3), s),
            v=d.stream.v + after_zeros(xp.sum(c * d_o, axis=3), s),
        )
        d_u = xp.sum(d_c * q * k, axis=(0, TIME), keepdims=True)
        gradients = self.gradients(x, d_stream, frame)
        gradients["u"] = queries_of_rows(d_u, x["q"].shape[2])[0, 0, ...]
        return gradients, {"state": d.state}


def bonus_of(x: ByName, m: int) -> Array:
    """u (1, m, 1, r, d), for m heads with a state."""
    return queries_of_states(x["u"][None, None, ...], m)


def read_before(form: Form, x: Stream, state: Array, frame: Frame) -> tuple[Array, Array]:
    """The outputs S_{t−1}ᵀ q_t (b, m, t, r, e) of a stream, and its final state (b, m, d, e)."""
    q, xp = where_same_segment(x.q, frame, tokens=x.k.shape[TIME]), namespace(x.q)
    if q.shape[TIME] != x.k.shape[TIME]:
        o, final = form.forward(x._replace(q=_then_zero(q, x.q)), state)
        return o[:, :, :-1, ...], final
    # Read first: the form may write the new state to the memory of this one. And as a sum: a
    # library may multiply matrices with fewer bits, which forms prevent in their own products.
    o_first = xp.sum(q[:, :, :1, :, :, None] * state[:, :, None, None, ...], axis=-2)
    o, final = form.forward(x._replace(q=next_token(q)), state)
    is_first = arange_like(q.shape[TIME], q)[:, None, None] == 0
    return xp.where(is_first, o_first, previous_token(o)), final


def read_before_vjp(
    form: Form, x: Stream, state: Array, d_o: Array, d_final: Array, frame: Frame
) -> StreamGradients:
    """The gradients of `read_before`, from those of its outputs and of the final state."""
    xp = namespace(d_o)
    q_first, q_later = _first_and_later(where_same_segment(x.q, frame, tokens=x.k.shape[TIME]), x)
    d_first, d_later = _first_and_later(d_o, x)
    earlier = x._replace(q=_then_zero(q_later, x.q))
    d = form.vjp(earlier, state, _then_zero(d_later, d_o), d_final)
    d_q_first = xp.sum(d_first[..., None, :] * state[:, :, None, None, ...], axis=-1)
    d_q = xp.concat([d_q_first, d.stream.q[:, :, :-1, ...]], axis=TIME)
    d_q = where_same_segment(d_q, frame, tokens=x.k.shape[TIME])
    d_state = d.state + xp.sum(q_first[..., None] * d_first[..., None, :], axis=(2, 3))
    return StreamGradients(d.stream._replace(q=d_q), d_state)


def _first_and_later(rows: Array, x: Stream) -> tuple[Array, Array]:
    """Rows (b, m, t, …) of the first of all tokens, if it is among theirs, and the others."""
    count = 1 if rows.shape[TIME] == x.k.shape[TIME] else 0
    return rows[:, :, :count, ...], rows[:, :, count:, ...]


def _then_zero(rows: Array, like: Array) -> Array:
    """Rows (b, m, t, …), and a token of zeros."""
    return namespace(rows).concat(
        [rows, namespace(like).zeros_like(like[:, :, :1, ...])], axis=TIME
    )


def _own_rows(x: Stream) -> tuple[Array, Array]:
    """The keys and values (b, m, t, 1, …) of the queries' tokens."""
    start = x.k.shape[TIME] - x.q.shape[TIME]
    return x.k[:, :, start:, None, :], x.v[:, :, start:, None, :]
