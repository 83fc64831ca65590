"""Retention: linear attention with a fixed decay for each head.

    o_t = s S_tᵀ q_t,    S_t = γ_h S_{t−1} + k_t v_tᵀ,    γ_h = 1 − 2^{−5−h}

for query heads h = 0, 1, 2 … Source: RetNet (arXiv 2307.08621) Eq. 5–7. Not included are the
rotation of queries and keys (xPos), which comes before, the paper's normalisation of rows by
√Σ_j D_ij and max(|Σ_j Q K|, 1), and its group norm. γ is not differentiated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra.recurrence import Recurrence
from precondattn.arrays import Array, ByName, arange_like, cast, namespace
from precondattn.frame import Frame
from precondattn.spec.array_functions import repeat_heads, swap_time_and_heads, where_valid
from precondattn.spec.linear_family import LinearFamily


def retention_decay(x: ByName, frame: Frame) -> Array:
    """log γ_h of every token (b, h, s, 1, 1), for each query head; 0 at masked tokens."""
    heads = x["q"].shape[2]
    k = repeat_heads(swap_time_and_heads(x["k"]), heads)[..., :1]
    xp, h = namespace(k), cast(arange_like(heads, k), k.dtype)
    g = xp.log1p(-(2.0 ** (-5.0 - h)))[None, :, None, None]
    return where_valid(xp.broadcast_to(g, k.shape), frame)[..., None]


@dataclass(frozen=True)
class Retention(LinearFamily):
    """Retention: o_i = s Σ_{j≤i} γ^{i−j} (q_i·k_j) v_j, with γ = 1 − 2^{−5−h} for query head h.

    There is no gate input, and every query head has its own state. The state does not decay at
    padded and masked tokens.

    Source: RetNet (arXiv 2307.08621), Eq. 5–7, without its rotation and norms.

    Parameters
    ----------
    scale : float, optional
        The scale s; d^{-1/2} by default.

    Examples
    --------
    A value of 1 decays by 31/32 per token:

    >>> import numpy as np, precondattn as pa
    >>> ones, v = np.ones((1, 3, 1, 1)), np.asarray([1.0, 0.0, 0.0]).reshape(1, 3, 1, 1)
    >>> (32 * pa.Retention()(ones, ones, v).ravel()).round(4)
    array([32.    , 31.    , 30.0312])
    """

    name: ClassVar[str] = "retention"
    variants: ClassVar[tuple[str, ...]] = ("retention[scale=0.3]",)
    declares = Recurrence("add", gate="fixed", heads="h")

    numbers_heads = True

    def log_decay(self, x: ByName, frame: Frame) -> Array:
        return retention_decay(x, frame)
