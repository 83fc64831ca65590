"""A small vision transformer: patches, blocks with any mechanism, and a classifier.

The equations and the declared weights are in `precondattn/layers/vision.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from precondattn.algebra.mechanism import Mechanism
from precondattn.arrays import DType
from precondattn.given import Arguments, Given
from precondattn.layers import vision
from precondattn.layers.flax.attention import Attention
from precondattn.layers.flax.module import parameter
from precondattn.layers.functions import layer_norm, upcast
from precondattn.layers.keywords import ChecksKeywords
from precondattn.layers.maps import Weight
from precondattn.layers.recipe import Recipe


class Affine(nnx.Module):
    """An affine map, W x + b."""

    def __init__(self, weights: dict[str, Weight], made: Arguments) -> None:
        self.weight = parameter(weights["weight"], **made)
        self.bias = parameter(weights["bias"], **made)

    def __call__(self, x: jax.Array) -> jax.Array:
        matrix = self.weight[...]
        return x @ matrix.reshape(len(matrix), -1).T + self.bias[...]


class Patches(Affine):
    """The embeddings W patch + b (b, t, width) of an image's patches, from (b, c, H, W)."""

    def __call__(self, x: jax.Array) -> jax.Array:
        b, c, height, width = x.shape
        rows, columns = self.weight.shape[2:]
        grid = x.reshape(b, c, height // rows, rows, width // columns, columns)
        patches = grid.transpose(0, 2, 4, 1, 3, 5).reshape(b, -1, c * rows * columns)
        return super().__call__(patches)


class LayerNorm(Affine):
    """The layer norm γ (x − mean x) / √(var x + eps) + β."""

    def __init__(self, width: int, eps: float, made: Arguments) -> None:
        super().__init__(vision.norm_weights(width), made)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        normed = layer_norm(upcast(x), self.eps)
        return (upcast(self.weight[...]) * normed + upcast(self.bias[...])).astype(x.dtype)


class MLP(nnx.Module):
    """The MLP W₂ GELU(W₁ x + b₁) + b₂."""

    def __init__(self, width: int, hidden: int, made: Arguments) -> None:
        weights = vision.mlp_weights(width, hidden)
        self.fc1, self.fc2 = Affine(weights["fc1"], made), Affine(weights["fc2"], made)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(jax.nn.gelu(self.fc1(x), approximate=False))


class VisionAttention(Attention):
    """`Attention` for vision transformers: with biases, and without rotary embeddings.

    The layer is the same as in `precondattn.layers.torch`, whose docstring lists timm's modules.

    Parameters
    ----------
    width, heads, mechanism, qkv_bias, recipes
        As in `precondattn.layers.torch.VisionAttention`.
    rngs : nnx.Rngs
        The random streams; `params` draws the initial values.
    **sizes
        `kv_heads`, `head_dim`, `value_dim`, `slots`, `depth` and `dtype` of `Attention`.

    Examples
    --------
    >>> import jax
    >>> from flax import nnx
    >>> from precondattn.layers.flax import VisionAttention
    >>> attn = VisionAttention(32, heads=4, mechanism="cross_covariance", rngs=nnx.Rngs(0))
    >>> attn(jax.numpy.ones((2, 64, 32), "float32")).shape
    (2, 64, 32)
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        mechanism: str | Mechanism = vision.NOT_CAUSAL,
        qkv_bias: bool = True,
        recipes: Mapping[str, Recipe] | None = None,
        rngs: nnx.Rngs,
        **sizes: Given,
    ) -> None:
        arguments = vision.attention_arguments(mechanism, qkv_bias, recipes)
        super().__init__(width, heads=heads, rngs=rngs, **arguments, **sizes)


class VisionBlock(nnx.Module):
    """A pre-norm block: z = x + attention(LN(x)), and the result z + MLP(LN(z))."""

    def __init__(
        self, width: int, hidden: int, eps: float, made: Arguments, **attention: Given
    ) -> None:
        self.norm1 = LayerNorm(width, eps, made)
        self.attn = VisionAttention(width, **attention, **made)
        self.norm2 = LayerNorm(width, eps, made)
        self.mlp = MLP(width, hidden, made)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(ChecksKeywords, nnx.Module):
    """A classifier of images: patches, learned positions, pre-norm blocks, and a linear head.

    The model is the same as in `precondattn.layers.torch`, with weights of the same names and
    shapes. Images are (b, channels, rows, columns), as in PyTorch.

    Parameters
    ----------
    image, patch, width, heads, blocks, classes, mechanism, channels, pool, hidden, qkv_bias, eps
        As in `precondattn.layers.torch.VisionTransformer`.
    dtype, rngs
        As in `Attention`.

    Examples
    --------
    >>> import jax
    >>> from flax import nnx
    >>> from precondattn.layers.flax import VisionTransformer
    >>> model = VisionTransformer(
    ...     8, 2, 16, heads=4, blocks=2, classes=10, channels=1, rngs=nnx.Rngs(0)
    ... )
    >>> model(jax.numpy.ones((5, 1, 8, 8), "float32")).shape
    (5, 10)
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
        dtype: DType = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        sizes = vision.vision_sizes(
            image, patch, width, blocks, classes, channels, pool, hidden, mechanism
        )
        made = {"dtype": dtype, "rngs": rngs}
        self.sizes, width, classes = sizes, sizes.width, sizes.classes
        for name, weight in vision.token_weights(sizes).items():
            setattr(self, name, parameter(weight, **made))
        self.patch_embed = nnx.Dict({"proj": Patches(vision.patch_weights(sizes), made)})
        self.blocks = nnx.List(
            [
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
            ]
        )
        self.norm = LayerNorm(width, eps, made)
        self.head = Affine(vision.affine_weights(width, classes), made)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits (b, classes) of images x (b, channels, rows, columns)."""
        vision.check_image(x, self.sizes)
        positions = self.pos_embed[...]
        if x.dtype != positions.dtype:
            raise TypeError(f"x must be {positions.dtype}, as the weights; found {x.dtype}")
        return vision.logits(self, x)
