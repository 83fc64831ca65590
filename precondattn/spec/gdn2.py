"""Gated DeltaNet 2: the delta rule with separate strengths to erase and to write, by channel.

    o_t = s S_tᵀ q_t,    S_t = S'_t + k_t (w_t ∘ v_t − S'_tᵀ (b_t ∘ k_t))ᵀ,
    S'_t = diag(e^{g_t}) S_{t−1}

Source: flash-linear-attention, fla/ops/gdn2. A token multiplies the state by
(I − k (b ∘ k)ᵀ) diag(e^{g}). The eigenvalue along k of the first factor is 1 − Σ b k², which is in
[−1, 1] for b in [0, 2] and keys of length 1. Its norm is more than 1 where b ∘ k is not parallel to
k, by at most ‖b ∘ k − (b·k²) k‖: the rule is then no contraction in the Euclidean norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra.declaration import Inputs
from precondattn.arrays import Array, Arrays, namespace
from precondattn.frame import Frame
from precondattn.spec.array_functions import (
    repeat_heads,
    sum_heads,
    swap_time_and_heads,
    where_valid,
)
from precondattn.spec.linear_family import LinearFamily
from precondattn.spec.recurrence import Stream


@dataclass(frozen=True)
class GDN2(LinearFamily):
    """Gated DeltaNet 2: S_t = S' + k_t (w_t ∘ v_t − S'ᵀ (b_t ∘ k_t))ᵀ, S' = diag(e^{g_t}) S_{t−1}.

    `b` (b, s, u, d) says how much each key channel erases, and `w` (b, s, u, e) how much each value
    channel is written; `g` (b, s, u, d) is the log-decay of each key channel. The output is
    s S_tᵀ q_t. Queries and keys are not normalised here; keys should have length 1. Entries outside
    the declared ranges are not rejected. Each value head has its own gates and a state.

    Parameters
    ----------
    scale : float, optional
        s; d^{-1/2} by default.

    Source
    ------
    flash-linear-attention, fla/ops/gdn2/naive.py.

    Examples
    --------
    With b = w = β in all channels it is Kimi Delta Attention:

    >>> import numpy as np, precondattn as pa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, g = rng.normal(size=(4, 1, 5, 2, 4))
    >>> k = k / np.linalg.vector_norm(k, axis=-1, keepdims=True)
    >>> beta, g = rng.uniform(size=(1, 5, 2)), -np.exp(g)
    >>> same = np.repeat(beta[..., None], 4, axis=-1)
    >>> kda = pa.KDA()(q, k, v, g=g, beta=beta)
    >>> bool(np.allclose(pa.GDN2()(q, k, v, g=g, b=same, w=same), kda))
    True
    """

    name: ClassVar[str] = "gdn2"
    variants: ClassVar[tuple[str, ...]] = ("gdn2[scale=0.3]",)
    heads: ClassVar[str] = "u"
    gate: ClassVar[str | None] = "channel"
    is_delta: ClassVar[bool] = True
    erase_name: ClassVar[str] = "k"
    """The input that b multiplies."""

    @property
    def inputs(self) -> Inputs:
        return Inputs(
            q="b t h d",
            k="b s h d unit row",
            v="b s u e",
            g="b s u d in (-inf, 0]",
            b="b s u d in [0, 2]",
            w="b s u e in [0, 1]",
        )

    def stream(self, x: Mapping[str, Array], frame: Frame) -> Stream:
        beta = namespace(x["k"]).ones_like(x["g"][..., 0])
        stream = super().stream({**x, "beta": beta}, frame)
        b, w = swap_time_and_heads(x["b"]), swap_time_and_heads(x["w"])
        erase = repeat_heads(swap_time_and_heads(x[self.erase_name]), b.shape[1])
        return stream._replace(erase=b * where_valid(erase, frame), v=w * stream.v)

    def gradients(self, x: Mapping[str, Array], d: Stream, frame: Frame) -> Arrays:
        m = d.k.shape[1]
        erase, v = (repeat_heads(swap_time_and_heads(x[n]), m) for n in (self.erase_name, "v"))
        b, w = swap_time_and_heads(x["b"]), swap_time_and_heads(x["w"])
        own = {"b": swap_time_and_heads(d.erase * erase), "w": swap_time_and_heads(d.v * v)}
        d_erase = sum_heads(where_valid(b * d.erase, frame), x[self.erase_name].shape[2])
        d_erase = swap_time_and_heads(d_erase)
        gradients = super().gradients(x, d._replace(v=w * d.v, beta=None), frame) | own
        if self.erase_name == "k":
            return gradients | {"k": gradients["k"] + d_erase}
        return gradients | {self.erase_name: d_erase}
