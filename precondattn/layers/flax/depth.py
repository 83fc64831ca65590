"""The index of a layer in its model: an int, or an array if one module is a stack of layers.

`nnx.vmap` creates a stack of layers as one module, which `nnx.scan` runs. Everything that differs
between the layers must be a variable, of which each layer has a slice.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from precondattn.given import at_least


class Depth(nnx.Variable[jax.Array]):
    """The depth () of a layer, or (layers,) of a stack. Not trained."""


def depth_of(depth: int) -> int | Depth:
    """An int unchanged, or an array as a variable."""
    if isinstance(depth, jax.Array):
        if depth.shape != () or not jnp.issubdtype(depth.dtype, jnp.integer):
            raise ValueError(
                f"depth must be a whole number or an integer array (); found {depth.dtype} "
                f"{depth.shape}"
            )
        if not isinstance(depth, jax.core.Tracer):
            at_least(0, "depth", depth)
        return Depth(depth)
    return at_least(0, "depth", depth)
