"""mLSTM, the matrix memory of xLSTM: a decayed state with an exponential input gate, normalised.

    C_t = e^{g_t} C_{t−1} + e^{i_t} k_t v_tᵀ,    n_t = e^{g_t} n_{t−1} + e^{i_t} k_t,
    o_t = s C_tᵀ q_t / max(|s n_tᵀ q_t|, 1)

Source: xLSTM (arXiv 2405.04517) Eq. 19–27. e^{i} has no bound, so C and n are kept relative to
e^{m}, and the 1 is e^{−m} then:

    m_t = max(g_t + m_{t−1}, i_t),    m_0 = −∞,
    C_t = e^{γ_t} C_{t−1} + w_t k_t v_tᵀ,    γ_t = g_t + m_{t−1} − m_t,    w_t = e^{i_t − m_t},
    o_t = s C_tᵀ q_t / (max(|s n_tᵀ q_t|, e^{−m_t}) + ε).

γ ≤ 0 and w ≤ 1, so this is SSD's recurrence on the values w [v, 1], whose last channel is n. m_t is
computed for all tokens first (`native/scan.py`), and γ from the differences of m as it was rounded:
C, n and m agree, however m was rounded.

Gradient. With a = s C_tᵀ q_t, c = s n_tᵀ q_t, and D the denominator,

    da = do / D,    dD = −(do·o) / D,    dc = sign(c) dD where |c| is the larger,

and those of the recurrence for γ, w v and w. If m_t is replaced by m_t + δ, all of C_t, n_t and
e^{−m_t} are multiplied by e^{−δ}. With ε = 0 no output changes. So all that m_t has an effect on is

    dm_t = ε dD_t,    and at the last token dm_N − Σ dC_N ∘ C_N − dn_N·n_N,
    dm_0 = Σ dC_0 ∘ C_0 + dn_0·n_0,

and M_t = dm_t + [g_{t+1} + m_t ≥ i_{t+1}] M_{t+1} is passed on to g_t, or to i_t if it is larger.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from precondattn.algebra import Inputs, Recurrence, options
from precondattn.arrays import Array, Arrays, ByName, linear_scan, namespace
from precondattn.cache import Slot
from precondattn.frame import Frame
from precondattn.spec.array_functions import finite_or_zero, row_sum, swap_time_and_heads
from precondattn.spec.linear import with_mass
from precondattn.spec.linear_family import LinearFamily, queries_of_states, rows_of_states
from precondattn.spec.recurrence import Form, Stream


class Scaled(NamedTuple):
    """The recurrence relative to the running maximum."""

    stream: Stream
    """The recurrence inputs, with the values w [v, 1] and the log-decays γ"""
    weight: Array
    """w (b, h, s, 1)"""
    maximum: Array
    """m (b, h, 1 + s), from m_0 on"""
    keeps: Array
    """Whether m_t is g_t + m_{t−1}, and not i_t (b, h, s)"""


@dataclass(frozen=True)
class MLSTM(LinearFamily):
    """mLSTM: o_t = s C_tᵀ q_t / max(|s n_tᵀ q_t|, 1), C and n decayed sums of e^{i} k vᵀ, e^{i} k.

    `g` (b, s, h) is the logarithm of the forget gate, and `i` (b, s, h) that of the input gate, of
    any size. xLSTM's pre-activations are f̃ and ĩ: `g` is log σ(f̃) and `i` is ĩ. Every query head
    has a state; keys and values may have fewer heads (n < h). A cache has `state` C and `mass` n,
    both divided by e^{m}, and `maximum` m. They are in float32 where inputs are in half precision.
    Before the first token m is −∞. A padded or masked token changes none of them.

    In `extend_vjp` C, n and m are three variables, as they are for automatic differentiation. With
    eps = 0 only C e^{m} and n e^{m} have an effect, so that the gradient of m is the sum of those
    of C and n, each times its variable.

    Source: xLSTM (arXiv 2405.04517), Eq. 19–27; eps from the public code, mlstm_kernels.

    Parameters
    ----------
    scale : float, optional
        The scale s; d^{-1/2} by default.
    eps : float
        Added to the denominator in the units in which the state is kept, that is divided by e^{m},
        m the running maximum: max(|s nᵀq|, 1) + eps e^{m}. With 0 the output does not depend on m,
        and is 0 where the denominator underflows to 0, as for keys of 0 after a large `i`.

    Examples
    --------
    With q = k and d = 1, an input gate that opens wide is a mean of the values, weighted by e^{i}:

    >>> import numpy as np, precondattn as pa
    >>> ones, v = np.ones((1, 3, 1, 1)), np.asarray([2.0, 4.0, 6.0]).reshape(1, 3, 1, 1)
    >>> open_gate = np.zeros((1, 3, 1))
    >>> pa.MLSTM()(ones, ones, v, g=open_gate, i=open_gate + 1000).ravel().round(4)
    array([2., 3., 4.])
    """

    name: ClassVar[str] = "mlstm"
    variants: ClassVar[tuple[str, ...]] = ("mlstm[eps=0]",)
    declares = Recurrence("add", gate="head", normaliser="running maximum", heads="h")

    eps: float = options.non_negative(1e-6)

    @property
    def inputs(self) -> Inputs:
        return Inputs(**super().inputs, i="b s h")

    def slots(self) -> tuple[Slot, ...]:
        return (
            Slot("state", "mlstm.state({k}, {v}, {g}, {i})", "b h d e", wide=True, symbol="C"),
            Slot("mass", "mlstm.mass({k}, {g}, {i})", "b h d", wide=True, symbol="n"),
            Slot(
                "maximum", "mlstm.maximum({g}, {i})", "b h", wide=True, empty=-math.inf, symbol="m"
            ),
        )

    computes_with_states = True

    def _scaled(self, initial: Array, x: ByName, frame: Frame) -> Scaled:
        """The recurrence of C and n together, from m_0."""
        plain = self.stream(x, frame)
        xp, v = namespace(plain.v), plain.v
        g, i = plain.g[..., 0, 0], swap_time_and_heads(x["i"])
        valid = frame.valid_keys(i.shape[2])
        if valid is not None:
            i = xp.where(valid[:, None, :], i, -math.inf)
        opened = xp.concat([initial[..., None], i], axis=-1)
        decay = xp.concat([xp.zeros_like(g[..., :1]), g], axis=-1)
        maximum = linear_scan(decay, opened, times=xp.add, plus=_larger)
        before, m = maximum[..., :-1], finite_or_zero(maximum[..., 1:])
        weight = xp.exp(i - m)[..., None]
        v = weight * xp.concat([v, xp.ones_like(v[..., :1])], axis=-1)
        gates = ((before - m) + g)[..., None, None]
        return Scaled(plain._replace(v=v, g=gates), weight, maximum, g + before >= i)

    def _divided(self, rows: Array, m: Array) -> tuple[Array, Array, Array]:
        """o, 1 / D, and whether |c| is the larger, of rows [a, c] (…, e + 1) and m (…, 1).

        a and D are multiplied by e^{min(m, 0)}, with which nothing overflows.
        """
        xp = namespace(rows)
        below = m < 0
        lifted, least = xp.exp(xp.where(below, m, 0.0)), xp.exp(-xp.where(below, 0.0, m))
        mass = lifted * xp.abs(rows[..., -1:])
        total = _larger(mass, least) + self.eps * lifted
        inverse = xp.where(total == 0, 0.0, lifted / xp.where(total == 0, 1.0, total))
        return rows[..., :-1] * inverse, inverse, mass >= least

    def run(self, state: ByName, x: ByName, frame: Frame, form: Form) -> tuple[Array, Arrays]:
        stream, _, maximum, _ = self._scaled(state["maximum"], x, frame)

        def output(rows: Array, m: Array) -> tuple[Array, ...]:
            return self._divided(rows, m)[:1]

        streams = [(stream, with_mass(state))]
        (out,), (last,) = form.read(streams, output, _of_queries(maximum, stream.q))
        final = {"state": last[..., :-1], "mass": last[..., -1], "maximum": maximum[..., -1]}
        return rows_of_states(out), final

    def run_vjp(
        self, state: ByName, x: ByName, frame: Frame, cotangent: Array, d_state: ByName, form: Form
    ) -> tuple[Arrays, Arrays]:
        xp = namespace(cotangent)
        stream, weight, maximum, keeps = self._scaled(state["maximum"], x, frame)
        initial, d_last = with_mass(state), with_mass(d_state)

        def pull(rows: Array, m: Array, d_o: Array) -> tuple[Array, ...]:
            out, inverse, is_larger = self._divided(rows, m)
            d_total = -row_sum(d_o * out) * inverse
            d_mass = xp.where(is_larger, xp.sign(rows[..., -1:]) * d_total, 0.0)
            return xp.concat([d_o * inverse, d_mass], axis=-1), self.eps * d_total

        arrays = _of_queries(maximum, stream.q), queries_of_states(cotangent, stream.k.shape[1])
        (d_rows, d_read), (last,) = form.read([(stream, initial)], pull, *arrays)
        d = form.vjp(stream, initial, d_rows, d_last)

        # Apart, so that where no token is valid d_begin − d_end is exactly 0.
        d_begin = xp.sum(d.state * initial, axis=(-2, -1))[..., None]
        d_end = xp.sum(d_last * last, axis=(-2, -1))[..., None]
        d_m = d_state["maximum"][..., None]
        nothing = xp.zeros_like(maximum)
        d_read = xp.concat([nothing, d_read[..., 0, 0]], axis=-1)[..., -maximum.shape[-1] :]
        through_read = xp.concat([d_read[..., :-1], d_read[..., -1:] + d_m], axis=-1)
        through_states = xp.concat([d_begin, nothing[..., 2:], -d_end], axis=-1)
        total = self._passed_on(keeps, through_read) + self._passed_on(keeps, through_states)

        d_m = total[..., 1:]
        d_i = xp.sum(d.stream.v * stream.v, axis=-1) + xp.where(keeps, 0.0, d_m)
        d_g = d.stream.g + xp.where(keeps, d_m, 0.0)[..., None, None]
        d_v = (weight * d.stream.v)[..., :-1]
        gradients = self.gradients(x, d.stream._replace(v=d_v, g=d_g), frame)
        gradients["i"] = swap_time_and_heads(d_i)
        d_first = {"state": d.state[..., :-1], "mass": d.state[..., -1], "maximum": total[..., 0]}
        return gradients, d_first

    @staticmethod
    def _passed_on(keeps: Array, d_maximum: Array) -> Array:
        """M (b, h, 1 + s): the scan of m backward."""
        xp = namespace(d_maximum)
        one = xp.ones_like(d_maximum)
        factor = xp.where(xp.concat([keeps, keeps[..., :1]], axis=-1), one, 0 * one)
        back = (xp.flip(a, axis=-1) for a in (factor, d_maximum))
        return xp.flip(linear_scan(*back, times=xp.multiply, plus=xp.add), axis=-1)


def _larger(first: Array, second: Array) -> Array:
    """The maximum; where both are equal, with the derivative of the first."""
    return namespace(first).where(first >= second, first, second)


def _of_queries(maximum: Array, queries: Array) -> Array:
    """m of the queries' tokens, for the one row of each (b, h, t, 1, 1)."""
    return maximum[..., maximum.shape[-1] - queries.shape[2] :][..., None, None]
