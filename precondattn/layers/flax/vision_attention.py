"""`VisionAttention`: attention layers of vision transformers, with any mechanism."""

from __future__ import annotations

from collections.abc import Mapping

from flax import nnx

from precondattn.algebra.mechanism import Mechanism
from precondattn.given import Given
from precondattn.layers.flax.attention import Attention
from precondattn.layers.recipe import Recipe
from precondattn.layers.vision import NOT_CAUSAL, attention_arguments


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
        mechanism: str | Mechanism = NOT_CAUSAL,
        qkv_bias: bool = True,
        recipes: Mapping[str, Recipe] | None = None,
        rngs: nnx.Rngs,
        **sizes: Given,
    ) -> None:
        arguments = attention_arguments(mechanism, qkv_bias, recipes)
        super().__init__(width, heads=heads, rngs=rngs, **arguments, **sizes)
