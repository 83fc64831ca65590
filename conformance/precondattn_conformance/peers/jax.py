"""JAX's attention, computed by XLA, and the references of its GPU and TPU kernels.

The softmax is in float32 for every dtype.
"""

from __future__ import annotations

from functools import partial

from precondattn.arrays import Array
from precondattn_conformance.peers.arrays import HALF32, Foreign, equally_wide, scale_of
from precondattn_conformance.peers.project import Project

JAX = Project("jax", "JAX", "https://github.com/jax-ml/jax", package="jax")
ALL = (JAX,)


def _attention(
    q: Array,
    k: Array,
    v: Array,
    scale: float | None,
    visible: Array | None = None,
    bias: Array | None = None,
    causal: bool = False,
    window: int | None = None,
) -> Array:
    from jax.nn import dot_product_attention as attend

    arrays, scale = equally_wide(q, k, v), scale_of(q, scale)
    # Here the window includes the token itself; JAX counts the tokens on each side of it.
    near = None if window is None else (window - 1, 0 if causal else window - 1)
    options: Foreign = {"is_causal": causal, "local_window_size": near}
    return attend(*arrays, bias, visible, scale=scale, **options)[..., : v.shape[-1]]


for _suffix, _takes in (
    ("", "visible bias?"),
    ("_is_causal", "causal="),
    ("_local_window", "causal= window="),
):
    _name, _load = f"dot_product_attention{_suffix}", partial(partial, _attention)
    JAX.direct(_name, "softmax", _load, f"q k v scale {_takes}", library="jax", dtypes=HALF32)


@JAX.peer("softmax", library="jax", heads="equal", dtypes=HALF32)
def pallas_gpu_mha_reference(
    q: Array, k: Array, v: Array, causal: bool, scale: float | None
) -> Array:
    attend = JAX.imported("jax.experimental.pallas.ops.gpu.attention").mha_reference
    out = attend(q, k, v, None, scale_of(q, scale), causal=causal)
    return out.astype(q.dtype)


@JAX.peer("softmax", library="jax", layout="bhtd", heads="equal", dtypes=HALF32)
def pallas_tpu_mha_reference(
    q: Array, k: Array, v: Array, causal: bool, scale: float | None, bias: Array | None = None
) -> Array:
    attend = JAX.imported("jax.experimental.pallas.ops.tpu.flash_attention").mha_reference
    arrays, scale = equally_wide(q, k, v), scale_of(q, scale)
    return attend(*arrays, bias, causal=causal, sm_scale=scale)[..., : v.shape[-1]]
