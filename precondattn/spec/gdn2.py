"""Gated DeltaNet 2: the delta rule with separate strengths to erase and to write, by channel.

    o_t = s S_tᵀ q_t,    S_t = S'_t + k_t (w_t ∘ v_t − S'_tᵀ (b_t ∘ k_t))ᵀ,
    S'_t = diag(e^{g_t}) S_{t−1}

Source: flash-linear-attention, fla/ops/gdn2. A token multiplies the state by
(I − k (b ∘ k)ᵀ) diag(e^{g}). The eigenvalue along k of the first factor is 1 − Σ b k², which is in
[−1, 1] for b in [0, 2] and keys of length 1. Its norm is more than 1 where b ∘ k is not parallel to
k, by at most ‖b ∘ k − (b·k²) k‖: the rule is then no contraction in the Euclidean norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Recurrence
from precondattn.arrays import Arrays, ByName, namespace
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

    Source: flash-linear-attention, fla/ops/gdn2/naive.py.

    Parameters
    ----------
    scale : float, optional
        The scale s; d^{-1/2} by default.

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
    declares = Recurrence("delta", gate="channel", strength="channel", heads="u")

    def _key(self) -> str:
        """The input that b multiplies."""
        return "k" if self.declares.erase == "written key" else self.erase_name

    def erased(self, x: ByName, frame: Frame) -> Arrays:
        b = swap_time_and_heads(x["b"])
        key = repeat_heads(swap_time_and_heads(x[self._key()]), b.shape[1])
        return {"erase": b * where_valid(key, frame)}

    def erased_vjp(self, x: ByName, d: Stream, frame: Frame) -> Arrays:
        b, of_keys = swap_time_and_heads(x["b"]), x[self._key()]
        key = repeat_heads(swap_time_and_heads(of_keys), b.shape[1])
        d_key = sum_heads(where_valid(b * d.erase, frame), of_keys.shape[2])
        return {"b": swap_time_and_heads(d.erase * key), self._key(): swap_time_and_heads(d_key)}

    def stream(self, x: ByName, frame: Frame) -> Stream:
        stream = super().stream(x, frame)
        written = swap_time_and_heads(x["w"]) * stream.v
        return stream._replace(v=written, beta=namespace(written).ones_like(stream.g[..., 0, 0]))

    def gradients(self, x: ByName, d: Stream, frame: Frame) -> Arrays:
        w = swap_time_and_heads(x["w"])
        v = repeat_heads(swap_time_and_heads(x["v"]), w.shape[1])
        gradients = super().gradients(x, d._replace(v=w * d.v, beta=None), frame)
        return gradients | {"w": swap_time_and_heads(d.v * v)}
