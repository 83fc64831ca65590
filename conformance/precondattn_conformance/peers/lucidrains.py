"""Packages of lucidrains, each with one form of attention in PyTorch."""

from __future__ import annotations

from precondattn.arrays import Array
from precondattn_conformance.peers.arrays import only_self_attention, widened
from precondattn_conformance.peers.project import Project


def _project(name: str, title: str) -> Project:
    return Project(name, title, f"https://github.com/lucidrains/{title}", package=title)


LOCAL = _project("local_attention", "local-attention")
LINEAR = _project("linear_attention_transformer", "linear-attention-transformer")
PERFORMER = _project("performer", "performer-pytorch")
NYSTROM = _project("nystrom_attention", "nystrom-attention")
SPARSE = _project("native_sparse_attention", "native-sparse-attention-pytorch")
ALL = (LOCAL, LINEAR, PERFORMER, NYSTROM, SPARSE)


@LOCAL.peer("softmax[window=5]", layout="bhtd", heads="equal")
def local_attention(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    window: int | None,
    scale: float | None,
    key_mask: Array | None = None,
) -> Array:
    """Local attention to a block and the one before it, of which `exact_windowsize` makes a
    band."""
    only_self_attention(q, k, 2)
    if window is None or window < 2:
        raise ValueError("it takes windows of at least one other token")
    attend = LOCAL.imported("local_attention").LocalAttention(
        window - 1, causal=causal, exact_windowsize=True, autopad=True, scale=scale
    )
    return attend(q, k, v, mask=key_mask)


@LINEAR.peer("elu1(linear[normalize=true,eps=0])", layout="bhtd", heads="equal")
def causal_linear_attn(q: Array, k: Array, v: Array, key_mask: Array | None = None) -> Array:
    """Has the features softmax(q) and exp(k), which for logarithms are those of elu + 1."""
    only_self_attention(q, k, 2)
    module = LINEAR.imported("linear_attention_transformer.linear_attention_transformer")
    q, k = (_elu1(x).log() for x in (q, k))
    wide = widened(v, q.shape[-1])
    out = module.causal_linear_attn(q, k, wide.clone(), key_mask, bucket_size=1)
    return out[..., : v.shape[-1]]


@PERFORMER.peer("elu1(linear[normalize=true,eps=0])", layout="bhtd", heads="equal")
def causal_linear_attention_noncuda(q: Array, k: Array, v: Array) -> Array:
    only_self_attention(q, k, 2)
    module = PERFORMER.imported("performer_pytorch.performer_pytorch")
    return module.causal_linear_attention_noncuda(_elu1(q), _elu1(k), v, eps=0.0)


def _elu1(x: Array) -> Array:
    from torch.nn.functional import elu

    return elu(x) + 1


@NYSTROM.peer("nystrom[landmarks=7,start=batch]", heads="equal")
def nystrom_attention(
    q: Array,
    k: Array,
    v: Array,
    landmarks: int,
    iterations: int,
    key_mask: Array | None = None,
) -> Array:
    import torch

    only_self_attention(q, k)
    b, t, h, d = q.shape
    if t % landmarks:
        raise ValueError("it pads tokens to a multiple of the landmarks: other segments than ours")
    if v.shape[-1] > d:
        raise ValueError("values are as wide as keys")
    layer = NYSTROM.imported("nystrom_attention").NystromAttention(
        h * d, d, h, landmarks, iterations, residual=False
    )
    layer.to_qkv = layer.to_out = torch.nn.Identity()
    rows = torch.cat([x.reshape(b, t, -1) for x in (q, k, widened(v, d))], -1)
    return layer(rows, key_mask).reshape(b, t, h, d)[..., : v.shape[-1]]


@SPARSE.peer("softmax", layout="bhtd")
def attend(q: Array, k: Array, v: Array, visible: Array, scale: float | None) -> Array:
    module = SPARSE.imported("native_sparse_attention_pytorch.native_sparse_attention")
    return module.attend(q, k, v, visible[:, None, ...], scale=scale)
