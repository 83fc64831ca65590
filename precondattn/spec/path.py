"""PaTH attention: softmax attention whose keys are transported to the query by reflections.

    o = softmax(s A + mask) v,    A_ij = q_iᵀ H_i H_{i−1} … H_{j+1} k_j,    H_t = I − β_t w_t w_tᵀ

Source: PaTH (arXiv 2505.16381); LUCID Table 1, whose row lacks the mask and s. It is `softmax` with
another metric; the mathematics of the metric is in `transported.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from precondattn.algebra.options import LONGEST, count
from precondattn.spec.distance import BUCKETS, LONGEST_OF_T5
from precondattn.spec.metric import Metric
from precondattn.spec.softmax import SoftmaxAttention
from precondattn.spec.transported import Transported


@dataclass(frozen=True)
class Path(SoftmaxAttention):
    """PaTH: o = softmax(s A + bias) v, A_ij = q_iᵀ H_i … H_{j+1} k_j, H_t = I − β_t w_t w_tᵀ.

    The directions `w` (b, s, n, d) are not normalised here. For rows of length 1 and `beta`
    (b, s, n) in [0, 2] scores are bounded by ‖q‖ ‖k‖; otherwise they may grow exponentially with
    the distance. Entries outside these ranges are not rejected. Position encodings such as RoPE
    are not needed.

    Source: PaTH Attention (arXiv 2505.16381) 3; LUCID Table 1.

    Parameters
    ----------
    scale, window, bias, forget, read
        As in `Softmax`. In flash-linear-attention the forget gate is inside the scale, as with
        `forget="scaled"`.
    flush : int
        The cached keys are rewritten whenever the length is a multiple of `flush`; the reflections
        since then are cached separately. 1 rewrites at every token.

    Examples
    --------
    With β = 2 and orthogonal directions, each token after the key flips one coordinate of it:

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

    causal: ClassVar[bool] = True  # type: ignore[misc]  # Keys are transported forward only.
    softcap: ClassVar[None] = None  # type: ignore[misc]
    sink: ClassVar[bool] = False  # type: ignore[misc]
    distance: ClassVar[str] = "none"  # type: ignore[misc]
    buckets: ClassVar[int] = BUCKETS  # type: ignore[misc]
    max_distance: ClassVar[int] = LONGEST_OF_T5  # type: ignore[misc]
    flush: int = count(1, highest=LONGEST)

    @property
    def metric(self) -> Metric:  # type: ignore[override]
        return Transported(self.flush)
