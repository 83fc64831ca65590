"""A small vision transformer: patches, blocks with any mechanism, and a classifier.

The equations and the declared weights are in `precondattn/layers/vision.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from precondattn.algebra.mechanism import Mechanism
from precondattn.arrays import Device
from precondattn.given import Arguments, Given
from precondattn.layers import vision
from precondattn.layers.keywords import ChecksKeywords
from precondattn.layers.maps import Weight
from precondattn.layers.recipe import Recipe
from precondattn.layers.torch.attention import Attention, is_autocast
from precondattn.layers.torch.module import empty_linear, fill_all, register


class Affine(nn.Module):
    """The base class of modules with a declared weight and bias."""

    def __init__(self, weights: dict[str, Weight], made: Arguments) -> None:
        super().__init__()
        self.weights = weights
        for name, weight in weights.items():
            register(self, name, weight, **made)

    def reset_parameters(self) -> None:
        fill_all(self, self.weights)


class Patches(Affine):
    """The embeddings W patch + b (b, t, width) of an image's patches, from (b, c, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        sides = self.weights["weight"].shape[2:]
        rows = nn.functional.conv2d(x, self.weight, self.bias, stride=sides)
        return rows.flatten(2).transpose(1, 2)


class LayerNorm(Affine):
    """The layer norm γ (x − mean x) / √(var x + eps) + β."""

    def __init__(self, width: int, eps: float, made: Arguments) -> None:
        super().__init__(vision.norm_weights(width), made)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class MLP(nn.Module):
    """The MLP W₂ GELU(W₁ x + b₁) + b₂."""

    def __init__(self, width: int, hidden: int, made: Arguments) -> None:
        super().__init__()
        self.weights = vision.mlp_weights(width, hidden)
        self.fc1 = empty_linear(width, hidden, is_biased=True, **made)
        self.fc2 = empty_linear(hidden, width, is_biased=True, **made)

    def reset_parameters(self) -> None:
        for name, weights in self.weights.items():
            fill_all(self.get_submodule(name), weights)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))


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
        mechanism: str | Mechanism = vision.NOT_CAUSAL,
        qkv_bias: bool = True,
        recipes: Mapping[str, Recipe] | None = None,
        **sizes: Given,
    ) -> None:
        arguments = vision.attention_arguments(mechanism, qkv_bias, recipes)
        super().__init__(width, heads=heads, **arguments, **sizes)


class VisionBlock(nn.Module):
    """A pre-norm block: z = x + attention(LN(x)), and the result z + MLP(LN(z))."""

    def __init__(
        self, width: int, hidden: int, eps: float, made: Arguments, **attention: Given
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(width, eps, made)
        self.attn = VisionAttention(width, **attention, **made)
        self.norm2 = LayerNorm(width, eps, made)
        self.mlp = MLP(width, hidden, made)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(ChecksKeywords, nn.Module):
    """A classifier of images: patches, learned positions, pre-norm blocks, and a linear head.

    Parameters
    ----------
    image : int or pair
        The numbers of rows and columns of pixels.
    patch : int or pair
        The numbers of rows and columns of a patch, which divide those of the image.
    width : int
        The width of the hidden states.
    heads, blocks, classes : int
        The numbers of heads, blocks and logits.
    mechanism : str, Mechanism or list
        The mechanism of all blocks, or one for each. `windowed` needs `pool="mean"`, because a
        class token has no place on the grid.
    channels : int
        The number of channels of an image.
    pool : "token" or "mean"
        The vector that is classified: that of a learned class token, which precedes the patches, or
        the mean over all tokens.
    hidden : int, optional
        The inner width of the MLPs; 4 times the width by default.
    qkv_bias : bool
        Whether the maps to q, k and v have biases.
    eps : float
        The ε of the layer norms.
    device, dtype
        The device and dtype of all parameters. Images have the same dtype, unless autocast is on.

    Raises
    ------
    TypeError, ValueError
        for sizes that do not fit each other, and a class token with a causal mechanism.

    Examples
    --------
    >>> import torch
    >>> from precondattn.layers.torch import VisionTransformer
    >>> windows = [f"windowed[size=2,shift={shift},grid=4/4,bias=true]" for shift in (0, 1)]
    >>> model = VisionTransformer(
    ...     8, 2, 16, heads=4, blocks=2, classes=10, channels=1, pool="mean", mechanism=windows
    ... )
    >>> model(torch.randn(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """

    def __init__(
        self,
        image: int | tuple[int, int],
        patch: int | tuple[int, int],
        width: int,
        *,
        heads: int,
        blocks: int,
        classes: int,
        mechanism: vision.Mechanisms = vision.NOT_CAUSAL,
        channels: int = 3,
        pool: str = "token",
        hidden: int | None = None,
        qkv_bias: bool = True,
        eps: float = 1e-6,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = vision.vision_sizes(
            image, patch, width, blocks, classes, channels, pool, hidden, mechanism
        )
        made = {"device": device, "dtype": dtype}
        self.sizes, width, classes = sizes, sizes.width, sizes.classes
        self._tokens = vision.token_weights(sizes)
        for name, weight in self._tokens.items():
            register(self, name, weight, device, dtype)
        self.patch_embed = nn.ModuleDict({"proj": Patches(vision.patch_weights(sizes), made)})
        self.blocks = nn.ModuleList(
            VisionBlock(
                width,
                sizes.hidden,
                eps,
                made,
                heads=heads,
                mechanism=each,
                qkv_bias=qkv_bias,
                depth=depth,
            )
            for depth, each in enumerate(sizes.mechanisms)
        )
        self.norm = LayerNorm(width, eps, made)
        self.head = empty_linear(width, classes, is_biased=True, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights again, for example after `to_empty` of a model on `meta`."""
        fill_all(self, self._tokens)
        for module in self.modules():
            if isinstance(module, Affine | MLP | VisionAttention):
                module.reset_parameters()
        fill_all(self.head, vision.affine_weights(self.sizes.width, self.sizes.classes))

    def forward(self, x: Tensor) -> Tensor:
        """The logits (b, classes) of images x (b, channels, rows, columns)."""
        vision.check_image(x, self.sizes)
        if x.dtype != self.pos_embed.dtype and not is_autocast(x):
            raise TypeError(f"x must be {self.pos_embed.dtype}, as the weights; found {x.dtype}")
        return vision.logits(self, x)
