"""Attention functions of frameworks: PyTorch, JAX, Flax, Haiku, Equinox, Keras."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from precondattn.arrays import Array
from precondattn_conformance.peers.arrays import (
    HALF32,
    Foreign,
    equally_wide,
    equally_wide_by_default,
    mask_with_bias,
    scale_of,
    whole_mask,
)
from precondattn_conformance.peers.project import Project

# PyTorch's attention: `scaled_dot_product_attention`, FlexAttention, multi-head attention.

PYTORCH = Project("pytorch", "PyTorch", "https://pytorch.org", package="torch")


@PYTORCH.peer("softmax", layout="bhtd")
def sdpa(
    q: Array, k: Array, v: Array, visible: Array, scale: float | None, bias: Array | None = None
) -> Array:
    from torch.nn.functional import scaled_dot_product_attention

    mask = mask_with_bias(visible.expand(-1, -1, q.shape[2], k.shape[2]), bias, q)
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)


@PYTORCH.peer("softmax", layout="bhtd")
def sdpa_math(
    q: Array, k: Array, v: Array, visible: Array, scale: float | None, bias: Array | None = None
) -> Array:
    """`scaled_dot_product_attention` without the fused kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v, visible, scale, bias)


@PYTORCH.peer(
    "softmax",
    layout="bhtd",
    limits={
        "outputs": "with fewer queries than keys, the first query is aligned with the first key"
    },
)
def sdpa_is_causal(q: Array, k: Array, v: Array, causal: bool, scale: float | None) -> Array:
    from torch.nn.functional import scaled_dot_product_attention

    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


@PYTORCH.peer("softmax", layout="bhtd")
def sdpa_causal_lower_right(q: Array, k: Array, v: Array, scale: float | None) -> Array:
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    mask = causal_lower_right(q.shape[2], k.shape[2])
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)


def _score_mod(bias: Array | None, softcap: float | None) -> Callable[..., Array]:
    """FlexAttention's change of a score, without the mask."""
    import torch

    def changed(score: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if bias is None else score + bias[b, h, i, j]

    return changed


def _flex(
    masks_scores: bool,
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    scale: float | None,
    softcap: float | None,
    bias: Array | None,
) -> Array:
    """FlexAttention in eager mode, masked by scores of −∞ or, as its documentation recommends, by a
    block mask."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    (b, h, t, _), s = q.shape, k.shape[2]
    visible = visible.expand(b, 1, t, s)
    bias = None if bias is None else bias.expand(b, h, -1, -1)
    changed = _score_mod(bias, softcap)

    def masked(score: Array, b: Array, h: Array, i: Array, j: Array) -> Array:
        return torch.where(visible[b, 0, i, j], changed(score, b, h, i, j), -torch.inf)

    options = {"scale": scale, "enable_gqa": True}
    if masks_scores:
        return flex_attention(q, k, v, masked, **options)
    mask = create_block_mask(lambda b, h, i, j: visible[b, 0, i, j], b, 1, t, s, device=q.device)
    return flex_attention(q, k, v, changed, mask, **options)


for _name, _masks_scores in (("flex_score_mod", True), ("flex_block_mask", False)):
    _load, _takes = partial(partial, _flex, _masks_scores), "q k v visible scale softcap bias?"
    PYTORCH.direct(_name, "softmax", _load, _takes, layout="bhtd")


@PYTORCH.peer(
    "softmax",
    heads="equal",
    limits={
        "future": "its projections mix heads, so that a NaN in one head is in all of its token"
    },
)
def multi_head_attention(
    q: Array, k: Array, v: Array, visible: Array, bias: Array | None = None
) -> Array:
    """`multi_head_attention_forward`, which `nn.MultiheadAttention` calls, without its projections.

    It takes tokens first, heads concatenated, and values as wide as queries, and scales by that
    width.
    """
    import torch
    from torch.nn.functional import multi_head_attention_forward

    (b, t, h, d), s, e = q.shape, k.shape[1], v.shape[-1]
    q, k, v = equally_wide(q, k, v)
    width = q.shape[-1]
    low = torch.full((), -torch.inf, dtype=q.dtype, device=q.device)
    mask = torch.where(visible, low.new_zeros(()) if bias is None else bias, low)
    one = torch.eye(h * width, dtype=q.dtype, device=q.device)
    q = q * (width / d) ** 0.5
    q, k, v = (x.flatten(2).transpose(0, 1) for x in (q, k, v))
    out, _ = multi_head_attention_forward(
        q,
        k,
        v,
        embed_dim_to_check=h * width,
        num_heads=h,
        in_proj_weight=None,
        in_proj_bias=None,
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=one,
        out_proj_bias=None,
        need_weights=False,
        attn_mask=mask.expand(b, h, t, s).reshape(b * h, t, s),
        use_separate_proj_weight=True,
        q_proj_weight=one,
        k_proj_weight=one,
        v_proj_weight=one,
    )
    return out.transpose(0, 1).unflatten(2, (h, width))[..., :e]


# JAX's attention, computed by XLA, and the references of its GPU and TPU kernels.
#
# The softmax is in float32 for every dtype.

JAX = Project("jax", "JAX", "https://github.com/jax-ml/jax", package="jax")


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


# Flax: attention of NNX and of Linen, and the code path for dropout or a module.
#
# NNX calls JAX's attention, whose softmax is in float32, whatever the dtype is.

FLAX = Project("flax", "Flax", "https://github.com/google/flax", package="flax")


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


# Haiku: `MultiHeadAttention`, with its projections bypassed by a method interceptor.

HAIKU = Project("haiku", "Haiku", "https://github.com/google-deepmind/dm-haiku", package="dm-haiku")


@HAIKU.peer("softmax", library="jax", heads="equal")
def _multi_head_attention(q: Array, k: Array, v: Array, visible: Array) -> Array:
    haiku = HAIKU.imported("haiku")
    (b, t, h, d), e = q.shape, v.shape[-1]

    def unprojected(method: Foreign, args: Foreign, kwargs: Foreign, context: Foreign) -> Foreign:
        is_projected = isinstance(context.module, haiku.Linear)
        is_called = context.method_name == "__call__"
        return args[0] if is_projected and is_called else method(*args, **kwargs)

    def attend(*arrays: Array) -> Array:
        any_weights = haiku.initializers.Constant(0)
        layer = haiku.MultiHeadAttention(h, d, w_init=any_weights, value_size=e)
        with haiku.intercept_methods(unprojected):
            return layer(*(x.reshape(*x.shape[:2], -1) for x in arrays), visible)

    out = haiku.transform(attend).apply({}, None, q, k, v)
    return out.reshape(b, t, h, e)


# Equinox: attention of one head of one sequence, mapped over heads and sequences.

EQUINOX = Project(
    "equinox", "Equinox", "https://github.com/patrick-kidger/equinox", package="equinox"
)


@EQUINOX.peer("softmax", library="jax", layout="bhtd", heads="equal")
def dot_product_attention(q: Array, k: Array, v: Array, visible: Array) -> Array:
    import jax
    import jax.numpy as jnp

    attend = EQUINOX.imported("equinox.nn._attention").dot_product_attention
    mask = jnp.broadcast_to(visible[:, 0, ...], (q.shape[0], q.shape[2], k.shape[2]))
    of_sequence = jax.vmap(attend, in_axes=(0, 0, 0, None))
    return jax.vmap(of_sequence)(q, k, v, mask)


# Keras: `keras.ops.dot_product_attention` of its backends for JAX, PyTorch and NumPy.
#
# `KERAS_BACKEND` chooses the single backend of a process when Keras is imported. `keras.ops` calls
# a function of the backend's module. These peers call it directly, so that all three backends can
# be used in one process. With JAX it is JAX's attention, whose softmax is in float32.

KERAS = Project("keras", "Keras", "https://github.com/keras-team/keras", package="keras")


def _of_backend(backend: str) -> Foreign:
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
    return _of_backend(backend)(*arrays, scale=scale, **options)[..., : v.shape[-1]]


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
