"""Flax: attention of NNX and of Linen, and the code path for dropout or a module.

NNX calls JAX's attention, whose softmax is in float32, whatever the dtype is.
"""

from __future__ import annotations

from precondattn.arrays import Array
from precondattn_conformance.peers.arrays import HALF32, equally_wide_by_default, whole_mask
from precondattn_conformance.peers.project import Project

FLAX = Project("flax", "Flax", "https://github.com/google/flax", package="flax")
ALL = (FLAX,)


@FLAX.peer("softmax", library="jax", dtypes=HALF32)
def nnx(q: Array, k: Array, v: Array, visible: Array, bias: Array | None = None) -> Array:
    from flax.nnx import dot_product_attention

    # Its documentation allows values of another width, but JAX's function raises an error.
    arrays = equally_wide_by_default(q, k, v)
    return dot_product_attention(*arrays, bias, visible)[..., : v.shape[-1]]


@FLAX.peer("softmax", library="jax", dtypes=HALF32)
def nnx_is_causal(q: Array, k: Array, v: Array, causal: bool) -> Array:
    from flax.nnx import dot_product_attention

    arrays = equally_wide_by_default(q, k, v)
    return dot_product_attention(*arrays, is_causal=causal)[..., : v.shape[-1]]


@FLAX.peer("softmax", library="jax")
def nnx_with_a_module(
    q: Array, k: Array, v: Array, visible: Array, bias: Array | None = None
) -> Array:
    from flax import nnx

    mask = whole_mask(visible, q)
    return nnx.dot_product_attention(q, k, v, bias, mask, module=nnx.Module())


@FLAX.peer("softmax", library="jax", heads="equal")
def linen(q: Array, k: Array, v: Array, visible: Array, bias: Array | None = None) -> Array:
    from flax.linen import dot_product_attention

    return dot_product_attention(q, k, v, bias, whole_mask(visible, q))
