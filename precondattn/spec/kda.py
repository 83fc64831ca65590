"""Kimi Delta Attention: the delta rule with a decay for each key channel and token.

    o_t = s S_tᵀ q_t,    S_t = S'_t + β_t k_t (v_t − S'_tᵀ k_t)ᵀ,    S'_t = diag(e^{g_t}) S_{t−1}

Source: Kimi Linear (arXiv 2510.26692), Eq. 1. A token multiplies the state by
(I − β k kᵀ) diag(e^{g}), which is a contraction for 0 ≤ β ‖k‖² ≤ 2 and g ≤ 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra.recurrence import Recurrence
from precondattn.spec.linear_family import LinearFamily


@dataclass(frozen=True)
class KDA(LinearFamily):
    """Kimi Delta Attention: o_t = s S_tᵀ q_t, S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ.

    Here S' = diag(e^{g_t}) S_{t−1}: each row of the state (key channel) decays by its own factor,
    then the state is corrected, and then read. Queries and keys are not normalised here. Keys
    should have length 1 and `beta` (b, s, u) should be in [0, 2]; where β ‖k‖² > 2 and the gates do
    not compensate for it, the state grows exponentially. Entries outside the range are not
    rejected. The number of value heads is a multiple of that of query and key heads, and each value
    head has its own gates (b, s, u, d) and a state.

    Source: Kimi Linear (arXiv 2510.26692), Eq. 1.

    Parameters
    ----------
    scale : float, optional
        The scale s; d^{-1/2} by default.

    Examples
    --------
    With the same gate in all channels it is gated DeltaNet:

    >>> import numpy as np, precondattn as pa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 1, 5, 2, 4))
    >>> k = k / np.linalg.vector_norm(k, axis=-1, keepdims=True)
    >>> beta, g = np.ones((1, 5, 2)), -np.exp(rng.normal(size=(1, 5, 2)))
    >>> channels = np.repeat(g[..., None], 4, axis=-1)
    >>> gated = pa.GatedDelta()(q, k, v, g=g, beta=beta)
    >>> bool(np.allclose(pa.KDA()(q, k, v, g=channels, beta=beta), gated))
    True
    """

    name: ClassVar[str] = "kda"
    variants: ClassVar[tuple[str, ...]] = ("kda[scale=0.3]",)
    declares = Recurrence("delta", gate="channel", strength="scalar", heads="u")
