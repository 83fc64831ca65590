"""Keras: `keras.ops.dot_product_attention` of its backends for JAX, PyTorch and NumPy.

`KERAS_BACKEND` chooses the single backend of a process when Keras is imported. `keras.ops` calls a
function of the backend's module. These peers call it directly, so that all three backends can be
used in one process. With JAX it is JAX's attention, whose softmax is in float32.
"""

from __future__ import annotations

import os

from precondattn.arrays import Array
from precondattn_conformance.peers.arrays import HALF32, Foreign, equally_wide, scale_of
from precondattn_conformance.peers.project import Project

KERAS = Project("keras", "Keras", "https://github.com/keras-team/keras", package="keras")
ALL = (KERAS,)


def _attention(backend: str) -> Foreign:
    os.environ.setdefault("KERAS_BACKEND", "jax")  # The default, TensorFlow, is not needed.
    KERAS.imported("keras")
    return KERAS.imported(f"keras.src.backend.{backend}.nn").dot_product_attention


def _attend(
    backend: str, q: Array, k: Array, v: Array, scale: float | None, **others: Foreign
) -> Array:
    """Call a backend's attention; values are padded to the shape of keys."""
    arrays, scale = equally_wide(q, k, v), scale_of(q, scale)
    return _attention(backend)(*arrays, scale=scale, **others)[..., : v.shape[-1]]


@KERAS.peer("softmax", library="jax", dtypes=HALF32)
def jax(
    q: Array, k: Array, v: Array, visible: Array, scale: float | None, bias: Array | None = None
) -> Array:
    return _attend("jax", q, k, v, scale, bias=bias, mask=visible)


@KERAS.peer("softmax", library="jax", dtypes=HALF32)
def jax_is_causal(q: Array, k: Array, v: Array, causal: bool, scale: float | None) -> Array:
    return _attend("jax", q, k, v, scale, is_causal=causal)


@KERAS.peer("softmax", library="torch")
def torch(
    q: Array, k: Array, v: Array, visible: Array, scale: float | None, bias: Array | None = None
) -> Array:
    if bias is None:
        return _attend("torch", q, k, v, scale, mask=visible)
    # With PyTorch it takes a bias or a mask, but not both.
    return _attend("torch", q, k, v, scale, bias=bias.masked_fill(~visible, -float("inf")))


@KERAS.peer("softmax", library="torch")
def torch_is_causal(q: Array, k: Array, v: Array, causal: bool, scale: float | None) -> Array:
    return _attend("torch", q, k, v, scale, is_causal=causal)


@KERAS.peer("softmax", library="numpy", gradient=False)
def numpy(
    q: Array, k: Array, v: Array, visible: Array, scale: float | None, bias: Array | None = None
) -> Array:
    return _attend("numpy", q, k, v, scale, bias=bias, mask=visible)


@KERAS.peer("softmax", library="numpy", heads="equal", gradient=False)
def numpy_equal_heads(
    q: Array, k: Array, v: Array, visible: Array, scale: float | None, bias: Array | None = None
) -> Array:
    return _attend("numpy", q, k, v, scale, bias=bias, mask=visible)
