"""State-space duality, the core of Mamba-2: linear attention with a decay for each head and token.

    o_t = s S_tᵀ q_t,    S_t = e^{g_t} S_{t−1} + k_t v_tᵀ,    s = 1

Source: Mamba-2 (arXiv 2405.21060) 5–6, with q = C, k = B, v = Δ x, g = Δ A, which `mamba2_inputs`
computes. With a scale of d^{-1/2} it is "simple GLA" of flash-linear-attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra import Recurrence, options
from precondattn.spec.linear_family import LinearFamily


@dataclass(frozen=True)
class SSD(LinearFamily):
    """Mamba-2's recurrence: o_i = s Σ_{j≤i} e^{g_{j+1} + … + g_i} (q_i·k_j) v_j.

    The number of value heads is a multiple of that of query and key heads (Mamba-2's groups). Each
    value head has a gate and a state.

    Source: Mamba-2 (arXiv 2405.21060), 5–6.

    Parameters
    ----------
    scale : float, optional
        The scale s; 1 by default, as in Mamba-2, and d^{-1/2} with None.

    Examples
    --------
    >>> import numpy as np, precondattn as pa
    >>> ones, v = np.ones((1, 3, 1, 1)), np.asarray([1.0, 0.0, 0.0]).reshape(1, 3, 1, 1)
    >>> pa.SSD()(ones, ones, v, g=np.full((1, 3, 1), np.log(0.5))).ravel().round(12)
    array([1.  , 0.5 , 0.25])
    """

    name: ClassVar[str] = "ssd"
    variants: ClassVar[tuple[str, ...]] = ("ssd[scale=none]",)
    declares = Recurrence("add", gate="head", heads="u")

    scale: float | None = options.positive_or_none(1.0)
