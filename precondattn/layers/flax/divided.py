"""Layers whose tokens are divided among the devices of a mesh in JAX.

Only the mechanism is divided explicitly. JAX shards everything else, and computes positions and
convolutions from whole arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flax import nnx

from precondattn.layers.flax.attention import Attention

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

LAYOUTS = ("heads", "contiguous")


def divide_tokens(
    model: nnx.Module, mesh: Mesh | AbstractMesh, axis: str, *, layout: str = "heads"
) -> None:
    """Make every `Attention` of a model divide the tokens of its mechanism among devices.

    The model is then called with whole arrays, inside `jit`. Shard their tokens along the axis, so
    that computations on single tokens are divided as well. Other axes of the mesh may shard the
    batch and weights. Packed sequences are given by `segment_ids`; caches and `cu_seqlens` are
    refused.

    Parameters
    ----------
    model : nnx.Module
        A model with `Attention` layers, such as a `Decoder`, or one `Attention`.
    mesh : jax.sharding.Mesh
        A mesh whose axes have the type `Auto`.
    axis : str
        The axis of the mesh that divides tokens.
    layout : {"heads", "contiguous"}
        The layout, as in `precondattn.parallel.jax.context_parallel`. Only layouts in which tokens
        are in order are possible, because rotary embeddings and convolutions need that.

    Raises
    ------
    ValueError
        for another layout, an axis of another type, a model without `Attention`, and the errors of
        `context_parallel`.

    Examples
    --------
    >>> import jax
    >>> from flax import nnx
    >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec
    >>> from precondattn.layers.flax import Decoder, divide_tokens
    >>> mesh = jax.make_mesh((1, 1), ("dp", "cp"), axis_types=(AxisType.Auto,) * 2)
    >>> model = Decoder(100, 32, heads=4, layers=["gla", "lucid"], rngs=nnx.Rngs(0))
    >>> divide_tokens(model, mesh, "cp")
    >>> sharding = NamedSharding(mesh, PartitionSpec("dp", "cp"))
    >>> tokens = jax.device_put(jax.numpy.ones((2, 8), int), sharding)
    >>> nnx.jit(lambda model, tokens: model(tokens))(model, tokens).shape
    (2, 8, 100)
    """
    from precondattn.parallel.jax import context_parallel

    if layout not in LAYOUTS:
        raise ValueError(
            f"layout must be one of {', '.join(map(repr, LAYOUTS))}, in which the tokens of layers "
            f"are in order; found {layout!r}"
        )
    if axis in mesh.explicit_axes:
        raise ValueError(
            f"mesh must have the axis {axis!r} of the type Auto; found Explicit, in which JAX can "
            f"not cut the tokens of a convolution"
        )
    layers = [layer for _, layer in nnx.iter_modules(model) if isinstance(layer, Attention)]
    if not layers:
        raise ValueError(f"model has no Attention; found {type(model).__name__}")
    divided = [context_parallel(layer.mechanism, mesh, axis, layout=layout) for layer in layers]
    for layer, of_layer in zip(layers, divided, strict=True):
        layer.divided = of_layer
