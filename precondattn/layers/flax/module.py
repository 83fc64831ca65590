"""Parameters of a module of Flax, from their declarations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from precondattn.layers.maps import Weight
from precondattn.layers.parameters import Draw


def parameter(weight: Weight, dtype: Any, rngs: nnx.Rngs) -> Any:
    """A new parameter, with the names of its axes as metadata."""
    draw: Draw = _Draw(weight.shape, dtype, rngs)
    first = weight.start(draw, weight.shape)
    # Names alone: a model is sharded as a whole, by rules for them.
    return nnx.Param(first, out_sharding=weight.names, eager_sharding=False)


class _Draw:
    """New arrays of the shape and dtype of one parameter."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, rngs: nnx.Rngs) -> None:
        self.shape, self.dtype, self.rngs = shape, dtype, rngs

    def normal(self) -> jax.Array:
        return jax.random.normal(self.rngs.params(), self.shape, self.dtype)

    def uniform(self) -> jax.Array:
        return jax.random.uniform(self.rngs.params(), self.shape, self.dtype)

    def constant(self, value: float) -> jax.Array:
        return jnp.full(self.shape, value, self.dtype)

    def identity(self) -> jax.Array:
        return jnp.broadcast_to(jnp.eye(self.shape[-1], dtype=self.dtype), self.shape)
