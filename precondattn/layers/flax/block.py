"""A pre-norm block of `Attention` and an MLP, and the norm that decoders use too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from precondattn.arrays import DType
from precondattn.given import Given
from precondattn.layers import decoder
from precondattn.layers.checks import LayerOutput
from precondattn.layers.flax.attention import Attention
from precondattn.layers.flax.module import ModuleMap, linear_of, parameter
from precondattn.layers.functions import rms_norm
from precondattn.layers.keywords import ChecksKeywords
from precondattn.layers.parameters import FanIn


class Norm(nnx.Module):
    """The RMS norm with a gain, γ RMSNorm(x)."""

    def __init__(self, width: int, dtype: DType, rngs: nnx.Rngs) -> None:
        self.gain = parameter(decoder.gain_weight(width), dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, decoder.EPS, self.gain[...])


class BlockMLP(nnx.Module):
    """The gated MLP W₃ (SiLU(W₁ y) ∘ W₂ y), or the plain MLP W₂ GELU(W₁ y)."""

    def __init__(self, width: int, hidden: int, mlp: str, dtype: DType, rngs: nnx.Rngs) -> None:
        self.maps = decoder.mlp_maps(width, hidden, mlp)
        for of_map in self.maps:
            setattr(self, of_map.name, linear_of(of_map, {"weight": FanIn()}, dtype, rngs))

    def __call__(self, y: jax.Array) -> jax.Array:
        maps = [ModuleMap(of_map, getattr(self, of_map.name)) for of_map in self.maps]
        return decoder.mlp_output(y, *maps)


class Block(ChecksKeywords, nnx.Module):
    """A pre-norm block: z = x + attention(norm(x)), and the result z + MLP(norm(z)).

    Parameters
    ----------
    width, hidden, mlp
        As in `precondattn.layers.torch.Block`.
    dtype, rngs
        As in `Attention`.
    **attention
        Other arguments of `Attention`.

    Examples
    --------
    >>> import jax
    >>> from flax import nnx
    >>> from precondattn.layers.flax import Block
    >>> block = Block(32, heads=4, mechanism="gla", rngs=nnx.Rngs(0))
    >>> block(jax.numpy.ones((2, 6, 32), "float32")).shape
    (2, 6, 32)
    """

    def __init__(
        self,
        width: int,
        *,
        hidden: int | None = None,
        mlp: str = "gated",
        dtype: DType = jnp.float32,
        rngs: nnx.Rngs,
        **attention: Given,
    ) -> None:
        decoder.check_mlp(mlp)
        self.attention = Attention(width, dtype=dtype, rngs=rngs, **attention)
        width = self.attention.plan.width
        self.attention_norm = Norm(width, dtype, rngs)
        self.mlp_norm = Norm(width, dtype, rngs)
        self.mlp = BlockMLP(width, decoder.hidden_width(width, hidden, mlp), mlp, dtype, rngs)

    def __call__(self, x: jax.Array, **options: Given) -> LayerOutput:
        """The new x, and the extended cache if one is given; options as in `Attention`."""
        return decoder.block_output(self, x, **options)
