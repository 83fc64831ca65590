"""DPLR, the core of RWKV-7: a transition that is a diagonal matrix plus one of rank one.

    o_t = s S_tᵀ q_t,    S_t = diag(e^{g_t}) S_{t−1} + b_t (S_{t−1}ᵀ a_t)ᵀ + k_t v_tᵀ

Source: RWKV-7 (arXiv 2503.14456), Eq. 17; flash-linear-attention, fla/ops/generalized_delta_rule.
What a reads in the state before its decay is written with b, and the value with k. It is the
recurrence in two steps for each token, of which the first erases with −a before the decay and
writes 0 with b, and the second adds v with k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Inputs, Recurrence
from precondattn.arrays import Arrays, ByName, namespace
from precondattn.frame import Frame
from precondattn.spec.array_functions import (
    repeat_heads,
    sum_heads,
    swap_time_and_heads,
    where_valid,
)
from precondattn.spec.linear_family import LinearFamily, where_same_segment
from precondattn.spec.recurrence import Stream
from precondattn.spec.several_steps import at_first, at_last, joined, of_first, of_last

STEPS = 2


@dataclass(frozen=True)
class DPLR(LinearFamily):
    """DPLR: o_t = s S_tᵀ q_t, S_t = diag(e^{g_t}) S_{t−1} + b_t (S_{t−1}ᵀ a_t)ᵀ + k_t v_tᵀ.

    `a` and `b` (b, s, h, d) are the keys that are read and written by the correction; `g`
    (b, s, u, d) is the log-decay of each key channel. Along b the transition has about the
    eigenvalue e^{g} + a·b: RWKV-7 has a = −κ and b = η ∘ κ, with κ of length 1 and η in [0, 1].
    Nothing is normalised here, and entries outside the declared ranges are not rejected. The number
    of value heads is a multiple of that of query and key heads, and each value head has a state.

    Source: RWKV-7 (arXiv 2503.14456), Eq. 17.

    Parameters
    ----------
    scale : float, optional
        The scale s; d^{-1/2} by default. RWKV-7 has 1.

    Examples
    --------
    With a = e^{g} ∘ k, b = −β k and values βv it is Kimi Delta Attention:

    >>> import numpy as np, precondattn as pa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, g = rng.normal(size=(4, 1, 5, 2, 4))
    >>> k = k / np.linalg.vector_norm(k, axis=-1, keepdims=True)
    >>> beta, g = rng.uniform(size=(1, 5, 2)), -np.exp(g)
    >>> by = beta[..., None]
    >>> out = pa.DPLR()(q, k, by * v, a=np.exp(g) * k, b=-by * k, g=g)
    >>> bool(np.allclose(out, pa.KDA()(q, k, v, g=g, beta=beta)))
    True
    """

    name: ClassVar[str] = "dplr"
    variants: ClassVar[tuple[str, ...]] = ("dplr[scale=1]",)
    declares = Recurrence("low rank", gate="channel", heads="u")
    steps_per_token = STEPS

    inputs = Inputs(
        q="b t h d",
        k="b s h d",
        v="b s u e",
        a="b s h d unit row",
        b="b s h d unit row",
        g="b s u d in (-inf, 0]",
    )

    def stream(self, x: ByName, frame: Frame) -> Stream:
        xp = namespace(x["k"])
        rows = super().stream(x, frame)
        m = rows.k.shape[1]
        a, b = (repeat_heads(swap_time_and_heads(x[name]), m) for name in "ab")
        a = where_same_segment(a, frame)  # The state before is that of another segment.
        keys = joined(xp.stack([where_valid(b, frame), rows.k], axis=3))
        return Stream(
            at_last(rows.q, STEPS),
            keys,
            at_last(rows.v, STEPS),
            at_first(rows.g, STEPS),
            xp.ones_like(keys[..., 0]),
            undecayed=at_first(-a, STEPS),
        )

    def gradients(self, x: ByName, d: Stream, frame: Frame) -> Arrays:
        assert d.undecayed is not None
        d_a = where_same_segment(-of_first(d.undecayed, STEPS), frame)
        d_b = where_valid(of_first(d.k, STEPS), frame)
        d_q, d_k, d_v = (of_last(array, STEPS) for array in (d.q, d.k, d.v))
        rows = Stream(d_q, d_k, d_v, of_first(d.g, STEPS))
        heads = x["k"].shape[2]
        return super().gradients(x, rows, frame) | {
            "a": swap_time_and_heads(sum_heads(d_a, heads)),
            "b": swap_time_and_heads(sum_heads(d_b, heads)),
        }
