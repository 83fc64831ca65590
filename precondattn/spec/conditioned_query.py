"""CCQ's preconditioner: the query, contracted along the directions in which keys vary most.

    q^c_t = q̄_t − λ_t Σ_t q̄_t,    Σ_t = C_t − μ_t μ_tᵀ,
    C_t = mean_{j≤t} k̄_j k̄_jᵀ,    μ_t = mean_{j≤t} k̄_j,    q̄ = L2(q),  k̄ = L2(k)

with the current key included. Source: CCQ (arXiv 2606.01294) Eq. 8–12. The gate λ, there
σ(W q̄ + b), is an input here (`contraction_gate` computes it). For a backbone with decay (App. I)
the means are weighted: n_t = α_t n_{t−1} + 1, n_t C_t = α_t n_{t−1} C_{t−1} + k̄ k̄ᵀ and n_t μ_t
likewise, with α the decay of the backbone. If that has one decay per key channel, α is their
geometric mean.

The sums are recurrences of the linear family, with keys and values k̄ and k̄ for n C, 1 and k̄ for
n μ, and 1 and 1 for n:

    c_t = Σ_t q̄_t = a_t / n_t − μ_t (μ_t·q̄_t),    a = linear attention of (q̄, k̄, k̄).

Gradient, with g = dq^c and h = −λ g:

    dλ = −g·c,    dq̄ = g + Σ h,    and from dc = h: da = h / n,  dμ = −h (μ·q̄) − q̄ (μ·h),
    dn = −(h·a) / n² − dμ·M / n²,  dM = dμ / n  (M = n μ),

through the two recurrences to k̄ and to the gate, then through L2 to q and k.

Cache: n C, n μ and n, in float32 or wider. Cancellation in Σ = C − μ μᵀ can make the relative error
large, but the absolute error stays at rounding, since ‖C‖ ≤ 1 for rows of length 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from precondattn.algebra import Inputs, options
from precondattn.arrays import Array, Arrays, ByName, namespace
from precondattn.cache import Slot
from precondattn.frame import Frame
from precondattn.spec.array_functions import (
    repeat_heads,
    row_sum,
    sum_heads,
    swap_time_and_heads,
    where_valid,
)
from precondattn.spec.l2_norm import l2_norm, l2_norm_vjp
from precondattn.spec.linear_family import (
    forget_other_segments,
    queries_of_rows,
    queries_of_states,
    rows_of_states,
)
from precondattn.spec.recurrence import Form, Stream
from precondattn.spec.retention import retention_decay
from precondattn.spec.stateful import Stateful

GATE = {"head": "b s h in (-inf, 0]", "channel": "b s n m in (-inf, 0]"}
"""The pattern of the backbone's gate: one per query head, or one per channel m and key head."""


@dataclass(frozen=True)
class KeyStatistics(Stateful):
    """What leaves share whose states are sums over keys that decay as a backbone does."""

    role: ClassVar[str] = "piece"
    output: ClassVar[str] = "b t h d"

    decay: str = options.choice("none", "head", "channel", "retention")

    @property
    def numbers_heads(self) -> bool:
        return self.decay == "retention"

    @cached_property
    def has_decay(self) -> bool:
        return self.decay != "none"

    @property
    def _gate(self) -> dict[str, str]:
        """The declaration of the gate."""
        return {"g": GATE[self.decay]} if self.decay in GATE else {}

    @property
    def _heads_and_decay(self) -> tuple[str, str]:
        """The letter of the heads that have statistics, and the decay in the names of slots."""
        heads = "h" if self.decay in ("head", "retention") else "n"
        return heads, {"none": "", "retention": ", retention"}.get(self.decay, ", {g}")

    def log_decay(self, x: ByName, frame: Frame) -> Array:
        """(b, m, s, 1, 1), for the heads m that have statistics."""
        k = swap_time_and_heads(x["k"])
        xp = namespace(k)
        if self.decay == "none":
            g = xp.zeros_like(k[..., :1])
        elif self.decay == "head":
            g = swap_time_and_heads(x["g"])[..., None]
        elif self.decay == "channel":
            g = xp.mean(swap_time_and_heads(x["g"]), axis=-1, keepdims=True)
        else:
            return forget_other_segments(retention_decay(x, frame), frame)
        return forget_other_segments(g[..., None], frame)

    def _gate_gradient(self, x: ByName, d_decay: Array) -> Arrays:
        """The gradient of the gate, from that of `log_decay`."""
        d_g = swap_time_and_heads(d_decay[..., 0])
        if self.decay == "head":
            return {"g": d_g[..., 0]}
        if self.decay != "channel":
            return {}
        channels = x["g"].shape[-1]
        return {"g": namespace(d_g).broadcast_to(d_g / channels, (*d_g.shape[:-1], channels))}


@dataclass(frozen=True)
class ConditionedQuery(KeyStatistics):
    """q^c = q̄ − λ Σ q̄, with Σ the running covariance of k̄; q̄ and k̄ have length 1.

    Source: CCQ (arXiv 2606.01294), Eq. 8–12, Algorithms 1 and 2; App. I for the decay.

    Parameters
    ----------
    decay : {"none", "head", "channel", "retention"}
        How the weight of earlier keys decays: not at all, by an input `g` per query head, by the
        mean over channels of an input `g` per key head and channel, or by retention's γ.
    eps : float
        In the norm: L2(x) = x / √(‖x‖² + eps).

    Examples
    --------
    The covariance of one key is 0; that of a key and its opposite is k̄ k̄ᵀ:

    >>> import numpy as np
    >>> q = np.asarray([[1.0, 0.0], [1.0, 0.0]]).reshape(1, 2, 1, 2)
    >>> k = np.asarray([[1.0, 0.0], [-1.0, 0.0]]).reshape(1, 2, 1, 2)
    >>> half = np.full((1, 2, 1), 0.5)
    >>> ConditionedQuery(eps=0)(q, k, contraction=half)[0, :, 0]
    array([[1. , 0. ],
           [0.5, 0. ]])
    """

    name: ClassVar[str] = "conditioned_query"
    variants: ClassVar[tuple[str, ...]] = (
        "conditioned_query[decay=head]",
        "conditioned_query[decay=channel]",
        "conditioned_query[decay=retention]",
    )

    eps: float = options.non_negative(1e-6)

    @property
    def inputs(self) -> Inputs:
        return Inputs(q="b t h d", k="b s n d", contraction="b t h in [0, 1]", **self._gate)

    def slots(self) -> tuple[Slot, ...]:
        heads, decay = self._heads_and_decay
        eps = "" if self.eps == type(self).eps else f"[eps={options.text_of(self.eps)}]"
        shapes = {"second": f"b {heads} d d", "first": f"b {heads} d"}
        moments = tuple(
            Slot(each, f"{each}_moment{eps}({{k}}{decay})", shape, True, symbol=f"{each}_moment")
            for each, shape in shapes.items()
        )
        count = f"count({{k}}{decay})"
        return (*moments, Slot("count", count, f"b {heads}", wide=True, symbol="count"))

    def _normalized(self, x: Array, form: Form) -> Array:
        """L2(x), of (b, t, h, d)."""
        (unit,) = form.by_tokens(lambda rows: (l2_norm(rows, self.eps),), x, axis=1)
        return unit

    def _streams(
        self, state: ByName, x: ByName, frame: Frame, form: Form
    ) -> list[tuple[Stream, Array]]:
        """The recurrences of n C, n μ and n, each with its state."""
        g = self.log_decay(x, frame)
        m = g.shape[1]
        # Padded keys are 0 in the call, but not after a feature map.
        k = where_valid(repeat_heads(swap_time_and_heads(self._normalized(x["k"], form)), m), frame)
        q = queries_of_states(self._normalized(x["q"], form), m)
        one = namespace(k).ones_like(k[..., :1])
        counted = where_valid(one, frame)
        read_all = one[:, :, k.shape[2] - q.shape[2] :, :, None]
        return [
            (Stream(q, k, k, g), state["second"]),
            (Stream(read_all, counted, k, g), state["first"][:, :, None, :]),
            (Stream(read_all, counted, one, g), state["count"][..., None, None]),
        ]

    def run(self, state: ByName, x: ByName, frame: Frame, form: Form) -> tuple[Array, Arrays]:
        streams = self._streams(state, x, frame, form)
        q = streams[0][0].q
        contraction = queries_of_states(x["contraction"][..., None], q.shape[1])
        (out,), finals = form.read(streams, contracted, q, contraction)
        second, first, count = finals
        new_state = {"second": second, "first": first[:, :, 0, :], "count": count[:, :, 0, 0]}
        return rows_of_states(out), new_state

    def run_vjp(
        self, state: ByName, x: ByName, frame: Frame, cotangent: Array, d_state: ByName, form: Form
    ) -> tuple[Arrays, Arrays]:
        streams = self._streams(state, x, frame, form)
        q = streams[0][0].q
        g = queries_of_states(cotangent, q.shape[1])
        contraction = queries_of_states(x["contraction"][..., None], q.shape[1])
        (d_q, d_contraction, *d_reads), _ = form.read(streams, _contracted_vjp, q, contraction, g)
        d_finals = (
            d_state["second"],
            d_state["first"][:, :, None, :],
            d_state["count"][..., None, None],
        )
        second, first, count = (
            form.vjp(stream, start, d_o, d_final)
            for (stream, start), d_o, d_final in zip(streams, d_reads, d_finals, strict=True)
        )
        (d_q,) = form.by_tokens(lambda a, b: (a + b,), d_q, second.stream.q)
        k_gradients = (second.stream.k, second.stream.v, first.stream.v)
        (d_k,) = form.by_tokens(lambda a, b, c: (a + b + c,), *k_gradients)
        d_k = swap_time_and_heads(sum_heads(where_valid(d_k, frame), x["k"].shape[2]))
        query_heads = x["q"].shape[2]

        def through_norm(rows: Array, d_unit: Array) -> tuple[Array]:
            return (l2_norm_vjp(rows, self.eps, d_unit),)

        d_unit_q = queries_of_rows(d_q, query_heads)
        gradients = {
            "q": form.by_tokens(through_norm, x["q"], d_unit_q, axis=1)[0],
            "k": form.by_tokens(through_norm, x["k"], d_k, axis=1)[0],
            "contraction": queries_of_rows(d_contraction, query_heads)[..., 0],
        }
        d_g = second.stream.g + first.stream.g + count.stream.g
        gradients |= self._gate_gradient(x, d_g)
        d_past = {
            "second": second.state,
            "first": first.state[:, :, 0, :],
            "count": count.state[:, :, 0, 0],
        }
        return gradients, d_past


def contracted(a: Array, total: Array, n: Array, q: Array, contraction: Array) -> tuple[Array, ...]:
    """q̄ − λ c, from a, n μ, n, q̄ and λ."""
    n = _positive(n)
    return (q - contraction / n * (a - total * (row_sum(total * q) / n)),)


def _contracted_vjp(
    a: Array, total: Array, n: Array, q: Array, contraction: Array, g: Array
) -> tuple[Array, ...]:
    """The gradients of q̄ (without the part through a), λ, a, n μ and n."""
    xp, n = namespace(q), _positive(n)
    mu, h = total / n, -contraction * g
    mu_q, mu_h = row_sum(mu * q), row_sum(mu * h)
    d_contraction = -row_sum(g * (a / n - mu * mu_q))
    # Sums over the r queries of one state.
    d_mu = -xp.sum(h * mu_q + q * mu_h, axis=-2, keepdims=True)
    d_n = -xp.sum(row_sum(h * a), axis=-2, keepdims=True) / (n * n) - row_sum(d_mu * mu) / n
    return g - mu * mu_h, d_contraction, h / n, d_mu / n, d_n


def _positive(n: Array) -> Array:
    """n, with 1 in place of 0 before the first valid token."""
    return namespace(n).where(n > 0, n, 1.0)
