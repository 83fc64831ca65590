"""PyTorch's attention: `scaled_dot_product_attention`, FlexAttention, multi-head attention."""

from __future__ import annotations

from collections.abc import Callable

from precondattn.arrays import Array
from precondattn_conformance.peers.arrays import equally_wide, heads_first, mask_with_bias
from precondattn_conformance.peers.project import Project

PYTORCH = Project("pytorch", "PyTorch", "https://pytorch.org", package="torch")
ALL = (PYTORCH,)


@PYTORCH.peer("softmax")
def sdpa(
    q: Array, k: Array, v: Array, visible: Array, scale: float | None, bias: Array | None = None
) -> Array:
    from torch.nn.functional import scaled_dot_product_attention

    mask = mask_with_bias(visible.expand(-1, -1, q.shape[1], k.shape[1]), bias, q)
    q, k, v = heads_first(q, k, v)
    out = scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)
    return heads_first(out)[0]


@PYTORCH.peer("softmax")
def sdpa_math(
    q: Array, k: Array, v: Array, visible: Array, scale: float | None, bias: Array | None = None
) -> Array:
    """`scaled_dot_product_attention` without the fused kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v, visible, scale, bias)


@PYTORCH.peer(
    "softmax",
    layout="bhtd",
    limits={
        "outputs": "with fewer queries than keys, the first query is aligned with the first key"
    },
)
def sdpa_is_causal(q: Array, k: Array, v: Array, causal: bool, scale: float | None) -> Array:
    from torch.nn.functional import scaled_dot_product_attention

    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


@PYTORCH.peer("softmax", layout="bhtd")
def sdpa_causal_lower_right(q: Array, k: Array, v: Array, scale: float | None) -> Array:
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    mask = causal_lower_right(q.shape[2], k.shape[2])
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)


def _score_mod(bias: Array | None, softcap: float | None) -> Callable[..., Array]:
    """FlexAttention's change of a score, without the mask."""
    import torch

    def changed(score: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if bias is None else score + bias[b, h, i, j]

    return changed


@PYTORCH.peer("softmax")
def flex_score_mod(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    scale: float | None,
    softcap: float | None,
    bias: Array | None = None,
) -> Array:
    """FlexAttention in eager mode, masked by scores of −∞."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    visible = visible.expand(q.shape[0], 1, q.shape[1], k.shape[1])
    bias = None if bias is None else bias.expand(q.shape[0], q.shape[2], -1, -1)
    changed = _score_mod(bias, softcap)

    def score_mod(score: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
        return torch.where(visible[b, 0, i, j], changed(score, b, h, i, j), -torch.inf)

    q, k, v = heads_first(q, k, v)
    return heads_first(flex_attention(q, k, v, score_mod, scale=scale, enable_gqa=True))[0]


@PYTORCH.peer("softmax")
def flex_block_mask(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    scale: float | None,
    softcap: float | None,
    bias: Array | None = None,
) -> Array:
    """FlexAttention in eager mode with a block mask, as its documentation recommends."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    (b, t, h, _), s = q.shape, k.shape[1]
    visible = visible.expand(b, 1, t, s)
    bias = None if bias is None else bias.expand(b, h, -1, -1)
    mask = create_block_mask(lambda b, h, i, j: visible[b, 0, i, j], b, 1, t, s, device=q.device)
    q, k, v = heads_first(q, k, v)
    out = flex_attention(q, k, v, _score_mod(bias, softcap), mask, scale=scale, enable_gqa=True)
    return heads_first(out)[0]


@PYTORCH.peer(
    "softmax",
    heads="equal",
    limits={
        "future": "its projections mix heads, so that a NaN in one head is in all of its token"
    },
)
def multi_head_attention(
    q: Array, k: Array, v: Array, visible: Array, bias: Array | None = None
) -> Array:
    """`multi_head_attention_forward`, which `nn.MultiheadAttention` calls, without its projections.

    It takes tokens first, heads concatenated, and values as wide as queries, and scales by that
    width.
    """
    import torch
    from torch.nn.functional import multi_head_attention_forward

    (b, t, h, d), s, e = q.shape, k.shape[1], v.shape[-1]
    q, k, v = equally_wide(q, k, v)
    width = q.shape[-1]
    low = torch.full((), -torch.inf, dtype=q.dtype, device=q.device)
    mask = torch.where(visible, low.new_zeros(()) if bias is None else bias, low)
    one = torch.eye(h * width, dtype=q.dtype, device=q.device)
    q = q * (width / d) ** 0.5
    q, k, v = (x.flatten(2).transpose(0, 1) for x in (q, k, v))
    out, _ = multi_head_attention_forward(
        q,
        k,
        v,
        embed_dim_to_check=h * width,
        num_heads=h,
        in_proj_weight=None,
        in_proj_bias=None,
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=one,
        out_proj_bias=None,
        need_weights=False,
        attn_mask=mask.expand(b, h, t, s).reshape(b * h, t, s),
        use_separate_proj_weight=True,
        q_proj_weight=one,
        k_proj_weight=one,
        v_proj_weight=one,
    )
    return out.transpose(0, 1).unflatten(2, (h, width))[..., :e]
