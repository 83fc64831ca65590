"""xFormers: the reference against which its kernels are tested, with its attention biases.

It computes and returns float32.
"""

from __future__ import annotations

from precondattn.arrays import Array
from precondattn_conformance.peers.arrays import HALF32, Foreign, scale_of
from precondattn_conformance.peers.project import Project

XFORMERS = Project(
    "xformers", "xFormers", "https://github.com/facebookresearch/xformers", package="xformers"
)
ALL = (XFORMERS,)


def _reference(q: Array, k: Array, v: Array, bias: Foreign, scale: float | None) -> Array:
    attend = XFORMERS.imported("xformers.attn_bias_utils").ref_attention_bmhk
    return attend(q, k, v, bias, scale_of(q, scale)).to(q.dtype)


def _biases() -> Foreign:
    return XFORMERS.imported("xformers.ops.fmha.attn_bias")


@XFORMERS.peer("softmax", heads="equal", dtypes=HALF32)
def ref_attention(
    q: Array, k: Array, v: Array, visible: Array, scale: float | None, bias: Array | None = None
) -> Array:
    import torch

    low = torch.full((), -torch.inf, dtype=q.dtype)
    added = torch.zeros((), dtype=q.dtype) if bias is None else bias
    shape = (q.shape[0], q.shape[2], *visible.shape[2:])
    whole = torch.where(visible, added, low).expand(shape)
    return _reference(q, k, v, whole.flatten(0, 1), scale)


@XFORMERS.peer("softmax", heads="equal", dtypes=HALF32)
def lower_triangular_from_bottom_right(
    q: Array, k: Array, v: Array, causal: bool, window: int | None, scale: float | None
) -> Array:
    if not causal and window is not None:
        raise ValueError("a window of its bias is causal")
    bias = _biases().LowerTriangularFromBottomRightMask() if causal else None
    if bias is not None and window is not None:
        bias = bias.make_local_attention(window)
    return _reference(q, k, v, bias, scale)


@XFORMERS.peer("softmax", heads="equal", dtypes=HALF32)
def lower_triangular(q: Array, k: Array, v: Array, causal: bool, scale: float | None) -> Array:
    bias = _biases().LowerTriangularMask() if causal else None
    return _reference(q, k, v, bias, scale)
