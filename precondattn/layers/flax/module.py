"""Parameters and linear maps of Flax modules: declared, drawn, and converted from PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from precondattn.arrays import Array, DType, Shape, Tree
from precondattn.given import at_least
from precondattn.layers.functions import LinearMap
from precondattn.layers.maps import Map, Weight
from precondattn.layers.parameters import FirstValues

if TYPE_CHECKING:
    from torch.nn import Module


def parameter(weight: Weight, dtype: DType, rngs: nnx.Rngs) -> nnx.Param:
    """A new parameter, with the names of its axes as metadata."""
    return nnx.Param(_first(weight, dtype, rngs), **_metadata(weight))


def linear_of(
    of_map: Map, starts: Mapping[str, FirstValues], dtype: DType, rngs: nnx.Rngs
) -> nnx.Linear:
    """The module of a linear map, initialised by the `starts` of "weight" and "bias"."""
    weights = {key: of_map.parameter(start, is_bias=key == "bias") for key, start in starts.items()}
    values = {key: _first(weight, dtype, rngs) for key, weight in weights.items()}
    inner, outer = weights["weight"].shape
    return nnx.Linear(
        inner,
        outer,
        use_bias="bias" in values,
        param_dtype=dtype,
        kernel_init=lambda *_: values["weight"],
        bias_init=lambda *_: values["bias"],
        kernel_metadata=_metadata(weights["weight"]),
        bias_metadata=_metadata(weights["bias"]) if "bias" in weights else {},
        rngs=_NoKeys(),
    )


def _first(weight: Weight, dtype: DType, rngs: nnx.Rngs) -> jax.Array:
    return weight.start(_Draw(dtype, rngs), weight.shape)


def _metadata(weight: Weight) -> dict[str, object]:
    # Only names: rules for names shard a model as a whole.
    return {"out_sharding": weight.names, "eager_sharding": False}


class _NoKeys:
    """A stand-in for `nnx.Rngs` if initial values are given and need no key."""

    def params(self) -> None:
        return None


def kernel_of(module: Module) -> jax.Array | None:
    """The matrix W of a linear map, also of a wrapped module; None if not floating-point."""
    while not hasattr(module, "kernel") and hasattr(module, "base_module"):  # As in `nnx.LoRA`.
        module = module.base_module
    kernel = getattr(module, "kernel", None)
    if not isinstance(kernel, nnx.Variable):
        return None
    array = kernel[...]
    is_weight = isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jnp.floating)
    return array if is_weight else None


class ModuleMap(LinearMap):
    """A linear map of a layer, also in JAX's explicit mode."""

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = kernel_of(self.module)
        of_x = jax.typeof(x).sharding
        of_weight = of_x if kernel is None else jax.typeof(kernel).sharding
        if kernel is None or not (of_x.mesh.explicit_axes or of_weight.mesh.explicit_axes):
            return super().__call__(x)
        # It requires the sharding of a sum over shards.
        x = self.map.joined(x)
        spec = jax.sharding.PartitionSpec(*jax.typeof(x).sharding.spec[:-1], *of_weight.spec[1:])
        return self.map.split(self.module(x, out_sharding=spec))


class _Draw:
    """New arrays with the dtype of a parameter."""

    def __init__(self, dtype: DType, rngs: nnx.Rngs) -> None:
        self.dtype, self.rngs = dtype, rngs

    def normal(self, shape: Shape) -> jax.Array:
        return jax.random.normal(self.rngs.params(), shape, self.dtype)

    def uniform(self, shape: Shape) -> jax.Array:
        return jax.random.uniform(self.rngs.params(), shape, self.dtype)

    def constant(self, shape: Shape, value: float) -> jax.Array:
        return jnp.full(shape, value, self.dtype)

    def identity(self, shape: Shape) -> jax.Array:
        return jnp.broadcast_to(jnp.eye(shape[-1], dtype=self.dtype), shape)


class Depth(nnx.Variable[jax.Array]):
    """The depth () of a layer, or (layers,) of a stack, which is not trained.

    `nnx.vmap` makes a stack of layers as one module, which `nnx.scan` runs. What differs between
    the layers must be a variable, of which each layer has a slice.
    """


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


def to_flax(state_dict: Mapping[str, Array]) -> dict[Tree, Tree]:
    """The state for `nnx.update`, a nested dict of JAX arrays, from a `state_dict` of PyTorch.

    The names are the same in both, except for linear maps: `"q_proj.weight"` (y, x) of an
    `nn.Linear` becomes `q_proj`, `kernel` (x, y) of an `nnx.Linear`.

    Examples
    --------
    >>> import torch
    >>> from precondattn.layers.flax import to_flax
    >>> to_flax({"blocks.0.attention.q_proj.weight": torch.ones(1, 2)})
    {'blocks': {0: {'attention': {'q_proj': {'kernel': Array([[1.],
           [1.]], dtype=float32)}}}}}
    """
    nested: dict[Tree, Tree] = {}
    for name, tensor in state_dict.items():
        *path, last = (int(key) if key.isdecimal() else key for key in name.split("."))
        branch = nested
        for key in path:
            branch = branch.setdefault(key, {})
        host = tensor.detach().cpu()
        if last == "weight" and path and str(path[-1]).endswith("_proj"):
            last, host = "kernel", host.T
        is_bfloat16 = str(host.dtype) == "torch.bfloat16"  # NumPy has no such type.
        array = jnp.asarray((host.float() if is_bfloat16 else host).numpy())
        branch[last] = array.astype(jnp.bfloat16) if is_bfloat16 else array
    return nested
