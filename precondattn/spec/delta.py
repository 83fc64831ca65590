"""The delta rule: a write corrects the value that the state stores for a key.

    o_t = s S_tᵀ q_t,    S_t = S'_t + β_t k_t (v_t − S'_tᵀ k_t)ᵀ

with S'_t = S_{t−1}, or, gated, e^{g_t} S_{t−1}, or, with a gate for each key channel,
diag(e^{g_t}) S_{t−1}. Sources: DeltaNet (arXiv 2406.06484) Eq. 2; gated DeltaNet (arXiv 2412.06464)
Eq. 10; Kimi Linear (arXiv 2510.26692) Eq. 1. The state is multiplied by I − β k kᵀ, which is a
contraction for 0 ≤ β ‖k‖² ≤ 2. So keys should have length 1, as `QKNorm(norm="l2")` and public
layers ensure. Outside that range the state grows by a factor |1 − β ‖k‖²| with every such key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra.recurrence import Recurrence
from precondattn.spec.linear_family import LinearFamily


@dataclass(frozen=True)
class Delta(LinearFamily):
    """DeltaNet: o_t = s S_tᵀ q_t, S_t = S_{t−1} + β_t k_t (v_t − S_{t−1}ᵀ k_t)ᵀ.

    Queries and keys are not normalised here. Keys should have length 1 and `beta` (b, s, u) should
    be in [0, 2]; where β ‖k‖² > 2 the state grows exponentially. Entries outside the range are not
    rejected. The number of value heads is a multiple of that of query and key heads, and each value
    head has a state.

    Source: Schlag et al. 2021 (arXiv 2102.11174), Eq. 24; DeltaNet (arXiv 2406.06484), Eq. 2.

    Parameters
    ----------
    scale : float, optional
        The scale s; d^{-1/2} by default.

    Examples
    --------
    With β = 1, a repeated key has its value replaced:

    >>> import numpy as np, precondattn as pa
    >>> k = np.ones((1, 3, 1, 1))
    >>> v = np.asarray([2.0, 5.0, 7.0]).reshape(1, 3, 1, 1)
    >>> pa.Delta()(k, k, v, beta=np.ones((1, 3, 1))).ravel()
    array([2., 5., 7.])
    """

    name: ClassVar[str] = "delta"
    variants: ClassVar[tuple[str, ...]] = ("delta[scale=0.3]",)
    declares = Recurrence("delta", strength="scalar", heads="u")


@dataclass(frozen=True)
class GatedDelta(LinearFamily):
    """Gated DeltaNet: o_t = s S_tᵀ q_t, S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ, S' = e^{g_t} S_{t−1}.

    The state decays, is corrected, and then read. Queries and keys are not normalised here. Keys
    should have length 1 and `beta` (b, s, u) should be in [0, 2]; where β ‖k‖² > 2 and the gate
    does not compensate for it, the state grows exponentially. Entries outside the range are not
    rejected. The number of value heads is a multiple of that of query and key heads, and each value
    head has a gate and a state.

    Source: Gated DeltaNet (arXiv 2412.06464), Eq. 10; CCQ 2.2.

    Parameters
    ----------
    scale : float, optional
        The scale s; d^{-1/2} by default.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.normal(size=(3, 1, 5, 2, 4))
    >>> beta, g = np.ones((1, 5, 2)), np.zeros((1, 5, 2))
    >>> k = k / np.linalg.vector_norm(k, axis=-1, keepdims=True)
    >>> ungated = pa.Delta()(q, k, v, beta=beta)
    >>> bool(np.allclose(pa.GatedDelta()(q, k, v, g=g, beta=beta), ungated))
    True
    """

    name: ClassVar[str] = "gated_delta"
    variants: ClassVar[tuple[str, ...]] = ("gated_delta[scale=0.3]",)
    declares = Recurrence("delta", gate="head", strength="scalar", heads="u")


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
