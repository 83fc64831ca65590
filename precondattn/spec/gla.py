"""Gated linear attention: linear attention with a decay for each key channel and token.

    o_t = s S_tᵀ q_t,    S_t = diag(e^{g_t}) S_{t−1} + k_t v_tᵀ

Source: GLA (arXiv 2312.06635) Eq. 3–4; there g = logsigmoid(x) / 16.

HGRN2 writes each channel as far as it forgets it: k_t = 1 − e^{g_t}, and dg_t −= e^{g_t} ∘ dk_t.
Source: HGRN2 (arXiv 2404.07904), 3.2, whose gate has a lower bound in each layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra.recurrence import Recurrence
from precondattn.spec.linear_family import LinearFamily


@dataclass(frozen=True)
class GLA(LinearFamily):
    """Gated linear attention: o_i = s Σ_{j≤i} Σ_c q_ic k_jc e^{g_{j+1,c} + … + g_ic} v_j.

    Keys, values and gates may have fewer heads than queries (n < h). There is one state per
    key/value head.

    Source: GLA (arXiv 2312.06635), Eq. 3–4.

    Parameters
    ----------
    scale : float, optional
        The scale s; d^{-1/2} by default.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
    >>> bool(np.allclose(pa.GLA()(q, k, v, g=0 * k), pa.Linear()(q, k, v)))
    True
    """

    name: ClassVar[str] = "gla"
    variants: ClassVar[tuple[str, ...]] = ("gla[scale=0.3]",)
    declares = Recurrence("add", gate="channel")


@dataclass(frozen=True)
class HGRN2(LinearFamily):
    """HGRN2: o_i = s Σ_{j≤i} Σ_c q_ic (1 − e^{g_jc}) e^{g_{j+1,c} + … + g_ic} v_j.

    There is no input k: the key of a token is 1 − e^g of its gate g (b, s, n, d). Values and gates
    may have fewer heads than queries (n < h). There is one state per value head.

    Source: HGRN2 (arXiv 2404.07904), 3.2.

    Parameters
    ----------
    scale : float, optional
        The scale s; d^{-1/2} by default.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> q, v, x = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4))
    >>> g = -np.exp(x)
    >>> bool(np.allclose(pa.HGRN2()(q, v, g=g), pa.GLA()(q, 1 - np.exp(g), v, g=g)))
    True
    """

    name: ClassVar[str] = "hgrn2"
    variants: ClassVar[tuple[str, ...]] = ("hgrn2[scale=0.3]",)
    declares = Recurrence("add", gate="channel", keys="of the gate")
