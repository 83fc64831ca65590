"""Gated DeltaProduct: several steps of the delta rule for each token.

    S_{t,0} = e^{g_t} S_{t−1},    S_{t,j} = S_{t,j−1} + β_tj k_tj (v_tj − S_{t,j−1}ᵀ k_tj)ᵀ,
    S_t = S_{t,n},                o_t = s S_tᵀ q_t

Source: DeltaProduct (arXiv 2502.10297), Eq. 7, with the gate of gated DeltaNet. A token multiplies
the state by a product of n matrices I − β k kᵀ, each of which is a reflection for β ‖k‖² = 2: with
n = 2 that is any rotation of a plane, and for β ‖k‖² ≤ 2 no direction grows. It is the gated delta
rule on n s steps, where the gate is that of the first step, and the queries read after the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Recurrence, options
from precondattn.arrays import Arrays, ByName
from precondattn.frame import Frame
from precondattn.spec.array_functions import repeat_heads, sum_heads, swap_time_and_heads
from precondattn.spec.linear_family import (
    LinearFamily,
    forget_other_segments,
    queries_of_rows,
    queries_of_states,
)
from precondattn.spec.recurrence import Stream
from precondattn.spec.several_steps import (
    at_first,
    at_last,
    heads_first,
    heads_last,
    joined,
    of_first,
    of_last,
    separate,
    steps_where_valid,
)


@dataclass(frozen=True)
class DeltaProduct(LinearFamily):
    """Gated DeltaProduct: n steps S ← S + β_j k_j (v_j − Sᵀ k_j)ᵀ for each token, after e^{g} S.

    `k` (b, s, n, h, d), `v` (b, s, n, u, e) and `beta` (b, s, n, u) have an axis of n steps after
    the token axis. `g` (b, s, u) is the log-decay of a token, before its first step; the output
    s S_tᵀ q_t reads after its last. Keys are not normalised here: they should have length 1, and
    `beta` should be in [0, 2]. Preconditioners that change keys refuse it, because a token has
    several.

    Source: DeltaProduct (arXiv 2502.10297), Eq. 7.

    Parameters
    ----------
    scale : float, optional
        The scale s; d^{-1/2} by default.
    steps : int
        The number n of steps for each token.

    Examples
    --------
    With one step it is gated DeltaNet:

    >>> import numpy as np, precondattn as pa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 1, 5, 2, 4))
    >>> k = k / np.linalg.vector_norm(k, axis=-1, keepdims=True)
    >>> g, beta = -rng.uniform(size=(1, 5, 2)), rng.uniform(size=(1, 5, 2))
    >>> one = (slice(None), slice(None), None)  # An axis of one step.
    >>> out = pa.DeltaProduct(steps=1)(q, k[one], v[one], g=g, beta=beta[one])
    >>> bool(np.allclose(out, pa.GatedDelta()(q, k, v, g=g, beta=beta)))
    True
    """

    name: ClassVar[str] = "delta_product"
    variants: ClassVar[tuple[str, ...]] = (
        "delta_product[scale=0.3]",
        "delta_product[steps=1]",
        "delta_product[steps=3]",
    )

    steps: int = options.count(2)

    @property
    def declares(self) -> Recurrence:
        return Recurrence("delta", gate="head", strength="scalar", steps=self.steps, heads="u")

    def stream(self, x: ByName, frame: Frame) -> Stream:
        n, m = self.steps, self.state_heads(x)
        g = forget_other_segments(self.log_decay(x, frame), frame)
        k = joined(repeat_heads(heads_first(x["k"]), m))
        return Stream(
            self.scale_for(x["q"].shape[3]) * at_last(queries_of_states(x["q"], m), n),
            steps_where_valid(k, n, frame),
            joined(heads_first(x["v"])),
            at_first(g, n),
            joined(heads_first(x["beta"])),
        )

    def gradients(self, x: ByName, d: Stream, frame: Frame) -> Arrays:
        n = self.steps
        assert d.beta is not None
        d_k = separate(sum_heads(steps_where_valid(d.k, n, frame), x["k"].shape[3]), n)
        d_q = queries_of_rows(of_last(d.q, n), x["q"].shape[2])
        return {
            "q": self.scale_for(x["q"].shape[3]) * d_q,
            "k": heads_last(d_k),
            "v": heads_last(separate(d.v, n)),
            "beta": heads_last(separate(d.beta, n)),
            "g": swap_time_and_heads(of_first(d.g, n)[..., 0, 0]),
        }
