"""Keras: `keras.ops.dot_product_attention` of its backends for JAX, PyTorch and NumPy.

`KERAS_BACKEND` chooses the single backend of a process when Keras is imported. `keras.ops` calls a
function of the backend's module. These peers call it directly, so that all three backends can be
used in one process. With JAX it is JAX's attention, whose softmax is in float32.
"""

from __future__ import annotations

import os
from functools import partial

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
    backend: str,
    q: Array,
    k: Array,
    v: Array,
    scale: float | None,
    visible: Array | None = None,
    bias: Array | None = None,
    causal: bool | None = None,
) -> Array:
    """Call a backend's attention; values are padded to the shape of keys."""
    arrays, scale = equally_wide(q, k, v), scale_of(q, scale)
    options = {"is_causal": causal} if visible is None else {"bias": bias, "mask": visible}
    if backend == "torch" and bias is not None and visible is not None:  # It takes one of them.
        options = {"bias": bias.masked_fill(~visible, -float("inf"))}
    return _attention(backend)(*arrays, scale=scale, **options)[..., : v.shape[-1]]


for _name, _backend, _takes, _arrangement in (
    ("jax", "jax", "visible bias?", {"dtypes": HALF32}),
    ("jax_is_causal", "jax", "causal=", {"dtypes": HALF32}),
    ("torch", "torch", "visible bias?", {}),
    ("torch_is_causal", "torch", "causal=", {}),
    ("numpy", "numpy", "visible bias?", {"gradient": False}),
    ("numpy_equal_heads", "numpy", "visible bias?", {"gradient": False, "heads": "equal"}),
):
    _load, _takes = partial(partial, _attend, _backend), f"q k v scale {_takes}"
    KERAS.direct(_name, "softmax", _load, _takes, library=_backend, **_arrangement)
