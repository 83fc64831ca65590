"""The preconditioner of PGDN and PKDA: channels that keys have filled are written more gently.

    A_t = e^{g_t} A_{t−1} + β_t k_t ∘ k_t,      r_t = log(A_t + ε) − c,
    m_t = x^{−r_t / (1 + |r_t|)},               out_t = m_t ∘ k_t

with a state A of d numbers for each key head, the diagonal of a decaying covariance of the keys. So
m is in (1/x, x), and is 1 where A + ε = e^{c}. Source: flash-linear-attention, fla/ops/atk and
fla/ops/precond_gated_delta_rule, where x = 1.5, ε = 10⁻⁶ and c = −0.2, or is learnt for each head.

A is a recurrence of the linear family: with β_t as the key, of one channel, k ∘ k as the value, and
1 as the query. Gradient, with D = dout ∘ k ∘ m:

    dr = −log x · D / (1 + |r|)²,    dA = dr / (A + ε),    dc = −Σ dr,
    dk = m ∘ dout + 2 k ∘ (gradient of the value),    dβ and dg from the recurrence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Flops, Inputs, options
from precondattn.arrays import Array, Arrays, ByName, namespace
from precondattn.cache import Slot
from precondattn.frame import Frame
from precondattn.spec.array_functions import row_sum, swap_time_and_heads, where_valid
from precondattn.spec.linear_family import forget_other_segments
from precondattn.spec.recurrence import Form, Stream
from precondattn.spec.stateful import Stateful


@dataclass(frozen=True)
class PreconditionedKey(Stateful):
    """m_t ∘ k_t, m = x^{−r/(1 + |r|)}, r = log(A + ε) − c, A_t = e^{g_t} A_{t−1} + β_t k_t ∘ k_t.

    `g_atk` (b, s, h) is the log-decay of A, and `beta_atk` (b, s, h) in (0, 1] its weight of a key.
    Keys should have length 1.

    Source: flash-linear-attention, fla/ops/precond_gated_delta_rule/naive.py.

    Parameters
    ----------
    bound : float
        x: every channel is multiplied by a factor between 1/x and x.
    eps : float
        ε, which stands for A in channels that no key has filled.
    center : float
        c: the logarithm of the A whose channels are left as they are.
    learned : bool
        Whether c is an input `log_atk_scale` (h) instead, one number for each head.

    Examples
    --------
    A channel with A + ε = e^{c} is left as it is:

    >>> import numpy as np
    >>> k = np.asarray([1.0, 0.0]).reshape(1, 1, 1, 2)
    >>> one = np.ones((1, 1, 1))
    >>> PreconditionedKey(center=0.0, eps=1e-9)(k, g_atk=0 * one, beta_atk=one).ravel().round(6)
    array([1., 0.])
    """

    name: ClassVar[str] = "preconditioned_key"
    role: ClassVar[str] = "piece"
    variants: ClassVar[tuple[str, ...]] = ("preconditioned_key[learned=true]",)

    bound: float = options.positive(1.5)
    eps: float = options.positive(1e-6)
    center: float = options.number(-0.2)
    learned: bool = options.flag(False)

    output = "b s h d"

    def check_together(self) -> None:
        if self.bound < 1:
            raise ValueError(
                f"atk: bound must be 1 or more, because factors are between 1/bound and "
                f"bound; found {self.bound:g}"
            )
        if self.learned and self.center != type(self).center:
            raise ValueError(
                f"atk: center is replaced by the input log_atk_scale where learned=true; "
                f"found center={self.center:g}"
            )

    @property
    def inputs(self) -> Inputs:
        learned = {"log_atk_scale": "h"} if self.learned else {}
        return Inputs(
            k="b s h d unit row",
            g_atk="b s h in (-inf, 0]",
            beta_atk="b s h in (0, 1]",
            **learned,
        )

    has_decay = True
    computes_with_states = True

    def slots(self) -> tuple[Slot, ...]:
        return (
            Slot(
                "squares", "atk.squares({k}, {g_atk}, {beta_atk})", "b h d", wide=True, symbol="A"
            ),
        )

    def flops(self, sizes: Mapping[str, int]) -> Flops:
        """Three operations for each number of the state, and three for its factor."""
        one_token = 6.0 * sizes["h"] * sizes["d"]
        tokens = sizes["s"] if "s" in sizes else sizes["t"]
        return Flops(tokens * one_token, 2.5 * tokens * one_token, one_token)

    def _stream(self, x: ByName, frame: Frame) -> Stream:
        """The recurrence of A, whose outputs are A_t (b, h, s, 1, d)."""
        k = where_valid(swap_time_and_heads(x["k"]), frame)
        weight = swap_time_and_heads(x["beta_atk"])[..., None]
        g = swap_time_and_heads(x["g_atk"])[..., None, None]
        one = namespace(k).ones_like(weight)[..., None]
        return Stream(one, weight, k * k, forget_other_segments(g, frame))

    def _center(self, x: ByName, k: Array) -> tuple[Array, ...]:
        """c (b, h, s, 1), where it is learnt."""
        if not self.learned:
            return ()
        c = x["log_atk_scale"][:, None, None]
        return (namespace(k).broadcast_to(c, (*k.shape[:3], 1)),)

    def _offset(self, squares: Array, center: tuple[Array, ...]) -> tuple[Array, Array]:
        """A + ε and r, of A (b, h, s, 1, d)."""
        filled = squares[:, :, :, 0, :] + self.eps
        return filled, namespace(squares).log(filled) - (center[0] if center else self.center)

    def run(self, state: ByName, x: ByName, frame: Frame, form: Form) -> tuple[Array, Arrays]:
        k = swap_time_and_heads(x["k"])

        def written(squares: Array, k: Array, *center: Array) -> tuple[Array, ...]:
            xp, (_, r) = namespace(k), self._offset(squares, center)
            return (k * xp.exp(-math.log(self.bound) * (r / (1 + xp.abs(r)))),)

        streams = [(self._stream(x, frame), state["squares"][:, :, None, :])]
        (out,), (last,) = form.read(streams, written, k, *self._center(x, k))
        return swap_time_and_heads(out), {"squares": last[:, :, 0, :]}

    def run_vjp(
        self, state: ByName, x: ByName, frame: Frame, cotangent: Array, d_state: ByName, form: Form
    ) -> tuple[Arrays, Arrays]:
        k, d_out = swap_time_and_heads(x["k"]), swap_time_and_heads(cotangent)
        stream, initial = self._stream(x, frame), state["squares"][:, :, None, :]
        rate = math.log(self.bound)

        def pulled(squares: Array, k: Array, d_out: Array, *center: Array) -> tuple[Array, ...]:
            xp, (filled, r) = namespace(k), self._offset(squares, center)
            m = xp.exp(-rate * (r / (1 + xp.abs(r))))
            d_r = -rate * d_out * k * m / (1 + xp.abs(r)) ** 2
            return m * d_out, row_sum(d_r), (d_r / filled)[:, :, :, None, :]

        arrays = (k, d_out, *self._center(x, k))
        (d_k, d_r, d_squares), _ = form.read([(stream, initial)], pulled, *arrays)
        d = form.vjp(stream, initial, d_squares, d_state["squares"][:, :, None, :])
        gradients = {
            "k": swap_time_and_heads(d_k + where_valid(2 * k * d.stream.v, frame)),
            "g_atk": swap_time_and_heads(d.stream.g[..., 0, 0]),
            "beta_atk": swap_time_and_heads(d.stream.k[..., 0]),
        }
        if self.learned:
            gradients["log_atk_scale"] = -namespace(d_r).sum(d_r, axis=(0, 2, 3))
        return gradients, {"squares": d.state[:, :, 0, :]}
