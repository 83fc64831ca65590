"""Gated slot attention: softmax attention to m slots, each a decaying memory of keys and values.

    K_t = K_{t−1} diag(e^{g_t}) + k_t s_tᵀ           (d × m)
    V_t = diag(e^{g_t}) V_{t−1} + s_t v_tᵀ           (m × e)
    p_t = softmax(s K_tᵀ q_t),    o_t = V_tᵀ p_t

Source: gated slot attention (arXiv 2409.07146) Eq. 7–8. Both are recurrences: the first with the
slot weights s as values and a decay for each of them, the second with s as keys. With L the logits,
the gradients are those of the recurrences:

    dp from the second,    dL = p ∘ (dp − p·dp),    ds_t and dg_t are the sums of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Inputs, Offers, Recurrence, options
from precondattn.arrays import Array, Arrays, ByName, namespace
from precondattn.cache import Slot
from precondattn.frame import Frame
from precondattn.spec.array_functions import softmax, softmax_vjp, swap_time_and_heads
from precondattn.spec.linear_family import (
    forget_other_segments,
    queries_of_rows,
    queries_of_states,
    rows_of_states,
)
from precondattn.spec.recurrence import Form, Stream
from precondattn.spec.stateful import Stateful


@dataclass(frozen=True)
class GSA(Stateful):
    """Gated slot attention: p_t = softmax(s K_tᵀ q_t), o_t = V_tᵀ p_t over m slots.

    `s` (b, s, n, m) is the weight with which a token is written to each slot, and `g` (b, s, n, m)
    the log-decay of each slot. The public layer has s = 1 − e^g, better computed as −expm1(g). The
    layer's activations of q, k and v (swish, silu) are not included. Keys, values, `s` and `g` may
    have fewer heads than queries (n < h); there are m slots per key/value head.

    Source: Gated slot attention (arXiv 2409.07146), Eq. 7–8.

    Parameters
    ----------
    scale : float, optional
        The scale s; d^{-1/2} by default. The public layer passes 1.

    Examples
    --------
    With one slot the softmax is 1, and the output does not depend on the query:

    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 4, 1, 2))
    >>> one, open_gate = np.ones((1, 4, 1, 1)), np.zeros((1, 4, 1, 1))
    >>> out = pa.GSA()(q, k, v, s=one, g=open_gate)
    >>> bool(np.allclose(out, np.cumsum(v, axis=1)))
    True
    """

    name: ClassVar[str] = "gsa"
    variants: ClassVar[tuple[str, ...]] = ("gsa[scale=1]",)

    declares = Recurrence("slots", gate="slot")

    scale: float | None = options.positive_or_none()

    inputs = Inputs(
        q="b t h d",
        k="b s n d",
        v="b s n e",
        s="b s n m in [0, 1]",
        g="b s n m in (-inf, 0]",
    )
    output = "b t h e"

    @property
    def offers(self) -> Offers:
        return Offers(scale=self.scale)

    def slots(self) -> tuple[Slot, ...]:
        return (
            Slot("keys", "gsa.keys({k}, {s}, {g})", "b n d m", wide=True, symbol="K"),
            Slot("values", "gsa.values({v}, {s}, {g})", "b n m e", wide=True, symbol="V"),
        )

    def _streams(
        self, state: ByName, x: ByName, frame: Frame, form: Form
    ) -> tuple[Stream, Stream, Array]:
        """The two recurrences, the second with queries p, and the final state of the first."""
        k, v, s, g = (swap_time_and_heads(x[name]) for name in ("k", "v", "s", "g"))
        q = self.scale_for(x["q"].shape[3]) * queries_of_states(x["q"], k.shape[1])
        gate = forget_other_segments(g[..., None], frame)
        of_keys = Stream(q, k, s, namespace(g).permute_dims(gate, (0, 1, 2, 4, 3)))
        logits, last = form.forward(of_keys, state["keys"])
        return of_keys, Stream(softmax(logits), s, v, gate), last

    def run(self, state: ByName, x: ByName, frame: Frame, form: Form) -> tuple[Array, Arrays]:
        _, of_values, keys = self._streams(state, x, frame, form)
        o, values = form.forward(of_values, state["values"])
        return rows_of_states(o), {"keys": keys, "values": values}

    def run_vjp(
        self, state: ByName, x: ByName, frame: Frame, cotangent: Array, d_state: ByName, form: Form
    ) -> tuple[Arrays, Arrays]:
        of_keys, of_values, _ = self._streams(state, x, frame, form)
        d_o = queries_of_states(cotangent, x["k"].shape[2])
        d_values = form.vjp(of_values, state["values"], d_o, d_state["values"])
        d_logits = softmax_vjp(of_values.q, d_values.stream.q)
        d_keys = form.vjp(of_keys, state["keys"], d_logits, d_state["keys"])
        first, second = d_keys.stream, d_values.stream
        gradients = {
            "k": swap_time_and_heads(first.k),
            "v": swap_time_and_heads(second.v),
            "s": swap_time_and_heads(first.v + second.k),
            "g": swap_time_and_heads(first.g[..., 0, :] + second.g[..., 0]),
        }
        d_q = queries_of_rows(first.q, x["q"].shape[2])
        gradients["q"] = self.scale_for(x["q"].shape[3]) * d_q
        return gradients, {"keys": d_keys.state, "values": d_values.state}
