"""`VisionAttention`: attention layers of vision transformers, with any mechanism."""

from __future__ import annotations

from collections.abc import Mapping

from precondattn.algebra.mechanism import Mechanism
from precondattn.given import Given
from precondattn.layers.recipe import Recipe
from precondattn.layers.torch.attention import Attention
from precondattn.layers.vision import NOT_CAUSAL, attention_arguments


class VisionAttention(Attention):
    """`Attention` for vision transformers: with biases, and without rotary embeddings.

    ===================================================  =====================================
    mechanism                                            timm's module
    ===================================================  =====================================
    ``softmax[causal=false]``                            `Attention` of ViT and DeiT
    ``windowed[size=7,grid=14/14,bias=true]``            `WindowAttention` of Swin and its windows
    ``windowed[size=7,shift=3,grid=14/14,bias=true]``    the same, shifted
    ``cross_covariance[eps=1e-24]``                      `XCA` of XCiT
    ``channel``                                          `ChannelAttention` of DaViT
    ``channel[scale_by=tokens]``                         `ChannelAttentionV2` of Florence-2
    ``outlook[size=3,stride=2,grid=28/28]``              `OutlookAttention` of VOLO
    ===================================================  =====================================

    x (b, t, width) has the tokens of an image, row by row.

    Parameters
    ----------
    width : int
        The width of x and y.
    heads : int
        The number of heads.
    mechanism : str or Mechanism
        The mechanism or its expression, such as `"row_normalized(softmax[causal=false])"`. Without
        `causal=false`, softmax is causal.
    qkv_bias : bool
        Whether the maps to q, k and v have biases. The map to the logits of `outlook` always has
        one.
    recipes : dict, optional
        Recipes in place of those of `precondattn.layers.vision.vision_recipes`, by input.
    **sizes
        `kv_heads`, `head_dim`, `value_dim`, `slots`, `depth`, `device` and `dtype` of `Attention`.

    Examples
    --------
    >>> import torch
    >>> from precondattn.layers.torch import VisionAttention
    >>> shifted = "row_normalized(windowed[size=4,shift=2,grid=8/8,bias=true])"
    >>> attn = VisionAttention(32, heads=4, mechanism=shifted)
    >>> attn(torch.randn(2, 64, 32)).shape
    torch.Size([2, 64, 32])
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        mechanism: str | Mechanism = NOT_CAUSAL,
        qkv_bias: bool = True,
        recipes: Mapping[str, Recipe] | None = None,
        **sizes: Given,
    ) -> None:
        arguments = attention_arguments(mechanism, qkv_bias, recipes)
        super().__init__(width, heads=heads, **arguments, **sizes)
