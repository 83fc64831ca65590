"""timm: `Attention` and `DiffAttention`, with identity projections and norms.

The package requires torchvision, but its attention does not, so the layers' files are imported
without the package.
"""

from __future__ import annotations

from functools import partial

from precondattn.arrays import Array
from precondattn_conformance.peers.arrays import (
    equally_wide_by_default,
    only_self_attention,
    widened,
)
from precondattn_conformance.peers.project import Project

TIMM = Project(
    "timm", "timm", "https://github.com/huggingface/pytorch-image-models", package="timm"
)
ALL = (TIMM,)


def _attention(q: Array, k: Array, v: Array, visible: Array, *, fused: bool) -> Array:
    import torch

    only_self_attention(q, k)
    e = v.shape[-1]
    q, k, v = equally_wide_by_default(q, k, v)
    b, t, h, d = q.shape
    layer = TIMM.imported_from("timm/layers", "attention").Attention(3 * h * d, h, d, h * d)
    layer.qkv = layer.proj = torch.nn.Identity()
    layer.fused_attn = fused
    rows = torch.stack([q, k, v], 2).reshape(b, t, -1)
    return layer(rows, visible).reshape(b, t, h, d)[..., :e]


def _differential(
    q: Array,
    k: Array,
    v: Array,
    q2: Array,
    k2: Array,
    lam: Array,
    visible: Array,
    *,
    fused: bool,
) -> Array:
    import torch

    only_self_attention(q, k)
    # Values are twice as wide as keys.
    (b, t, h, d), e = q.shape, v.shape[-1]
    width = max(d, (e + 1) // 2)
    to_scale = (width / d) ** 0.5
    pairs = (q * to_scale, q2 * to_scale), (k, k2)
    stacked = [torch.stack([widened(x, width) for x in pair], 3) for pair in pairs]
    rows = torch.cat([x.reshape(b, t, -1) for x in (*stacked, widened(v, 2 * width))], -1)
    module = TIMM.imported_from("timm/layers", "diff_attention")
    layer = module.DiffAttention(2 * h * width, h)
    layer.sub_norm = layer.proj = torch.nn.Identity()
    del layer.qkv  # A function can not replace a module.
    layer.qkv = lambda _: rows
    layer._compute_lambda, layer.lambda_init, layer.fused_attn = (lambda: lam), 0.0, fused
    # The output is as wide as the input, whose values are not used otherwise.
    out = layer(rows[..., : 2 * h * width], visible)
    return out.reshape(b, t, h, 2 * width)[..., :e]


for _suffix, _fused in (("", False), ("_fused", True)):
    for _name, _mechanism, _function, _takes in (
        ("attention", "softmax", _attention, "q k v visible"),
        ("diff_attention", "differential", _differential, "q k v q2 k2 lam visible"),
    ):
        _load = partial(partial, _function, fused=_fused)
        TIMM.direct(f"{_name}{_suffix}", _mechanism, _load, _takes, heads="equal")
