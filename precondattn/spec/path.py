"""PaTH attention: softmax attention whose keys are transported to the query by reflections.

    o = softmax(s A + mask) v,    A_ij = q_iᵀ H_i H_{i−1} … H_{j+1} k_j,    H_t = I − β_t w_t w_tᵀ

Source: PaTH (arXiv 2505.16381); LUCID Table 1, whose row lacks the mask and s. It is `softmax` with
another metric, and the mathematics is there (`transported.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra.options import count
from precondattn.spec.metric import Metric
from precondattn.spec.softmax import SoftmaxAttention
from precondattn.spec.transported import Transported


@dataclass(frozen=True)
class Path(SoftmaxAttention):
    """PaTH: o = softmax(s A + bias) v, A_ij = q_iᵀ H_i … H_{j+1} k_j, H_t = I − β_t w_t w_tᵀ.

    The directions `w` (b, s, n, d) are used as they are: normalise them first. For rows of length
    1 and `beta` (b, s, n) in [0, 2] scores are bounded by ‖q‖ ‖k‖; beyond, they grow exponentially
    with the distance. Values are not looked at. Position encodings such as RoPE are not needed.

    Parameters
    ----------
    scale, window, bias, forget, read
        As in `Softmax`. In flash-linear-attention the forget gate is inside the scale, as with
        `forget="scaled"`.
    flush : int
        In a cache, past keys are rewritten whenever the length is a multiple of it; the
        reflections since are kept beside them. 1 rewrites at every token.

    Source
    ------
    PaTH Attention (arXiv 2505.16381) 3; LUCID Table 1.

    Examples
    --------
    With β = 2 and orthogonal directions, a token behind the key flips one coordinate of it:

    >>> import numpy as np, precondattn as pa
    >>> k = np.ones((1, 2, 1, 2))
    >>> w = np.asarray([[1.0, 0.0], [0.0, 1.0]]).reshape(1, 2, 1, 2)
    >>> q, v = np.asarray([[1.0, 1.0]] * 2).reshape(1, 2, 1, 2), np.eye(2).reshape(1, 2, 1, 2)
    >>> beta = np.full((1, 2, 1), 2.0)
    >>> pa.Path(scale=1.0)(q, k, v, w=w, beta=beta)[0, 1, 0].round(3)  # scores 0 and 2
    array([0.119, 0.881])
    """

    name: ClassVar[str] = "path"
    variants: ClassVar[tuple[str, ...]] = (
        "path[scale=0.3]",
        "path[window=3]",
        "path[forget=unscaled]",
        "path[forget=scaled,flush=3]",
        "path[flush=2]",
    )

    causal: ClassVar[bool] = True  # type: ignore[misc]  # There is no product backward in time.
    flush: int = count(1)

    @property
    def metric(self) -> Metric:  # type: ignore[override]
        return Transported(self.flush)
