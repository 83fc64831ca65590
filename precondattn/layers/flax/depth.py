"""The index of a layer in its model: a number, or an array where one module is many layers.

`nnx.vmap` makes a stack of layers as one module, which `nnx.scan` runs. What differs between them
has to be a variable, of which each layer has its own slice.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from precondattn.layers.checks import check_depth


class Depth(nnx.Variable[jax.Array]):
    """The depth () of a layer, or (layers,) of a stack. Not trained."""


def depth_of(depth: int) -> int | Depth:
    """A whole number unchanged, and an array as a variable.

    Raises
    ------
    ValueError
        for anything but whole numbers, 0 or above, and integer arrays ().
    """
    if isinstance(depth, jax.Array):
        if depth.shape != () or not jnp.issubdtype(depth.dtype, jnp.integer):
            raise ValueError(
                f"depth must be a whole number or an integer array (); found {depth.dtype} "
                f"{depth.shape}"
            )
        if not isinstance(depth, jax.core.Tracer):
            check_depth(int(depth))
        return Depth(depth)
    check_depth(depth)
    number: int = depth
    return number
