"""Attention in chunks with a running maximum, as it was published in plain PyTorch and JAX."""

from __future__ import annotations

from types import ModuleType

from precondattn.arrays import Array
from precondattn_conformance.peers import given
from precondattn_conformance.peers.arrays import HALF32, equally_wide, equally_wide_by_default
from precondattn_conformance.peers.project import on_github

IN_PYTORCH = on_github(
    "lucidrains/memory-efficient-attention-pytorch@d54f391370ecbf843a871f0e260425d076995550",
    "2023-07-18",
    "memory-efficient-attention-pytorch",
)
IN_JAX = on_github(
    "lucidrains/flash-attention-jax@d73dcdd6cb4b4f8d786922e2ec6826036dae896a",
    "2023-07-17",
    "flash-attention-jax",
)
RING = on_github(
    "lucidrains/ring-attention-pytorch@373f75b725c2111bfe6a8d47c72a0b01995150c5",
    "2025-05-16",
    "ring-attention-pytorch",
)
REZAEI = on_github(
    "AminRezaei0x443/memory-efficient-attention@882c5e70d6b06b3215355b35435211c5b8caa75d",
    "2023-01-06",
    "memory-efficient-attention",
)
ALL = (IN_PYTORCH, IN_JAX, RING, REZAEI)

CHUNK = 16
"""The number of keys and queries in a chunk. The originals have 512 and 1024, for longer sequences
than are compared here."""


def _in_pytorch(file: str) -> ModuleType:
    given.of_einops()
    return IN_PYTORCH.imported(f"memory_efficient_attention_pytorch/{file}.py")


@IN_PYTORCH.peer("softmax", library="torch", layout="bhtd", heads="equal")
def attention(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    bias: Array | None = None,
    key_mask: Array | None = None,
) -> Array:
    module = _in_pytorch("memory_efficient_attention")
    return module.attention(q, k, v, mask=key_mask, causal=causal, attn_bias=bias)


@IN_PYTORCH.peer("softmax", library="torch", layout="bhtd", heads="equal")
def memory_efficient_attention(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    bias: Array | None = None,
    key_mask: Array | None = None,
) -> Array:
    module = _in_pytorch("memory_efficient_attention")
    return module.memory_efficient_attention(
        q,
        k,
        v,
        mask=key_mask,
        causal=causal,
        attn_bias=bias,
        q_bucket_size=CHUNK,
        k_bucket_size=CHUNK,
        eps=0.0,
    )


@IN_PYTORCH.peer("softmax", library="torch", layout="bhtd", heads="equal", dtypes=HALF32)
def flash_attention(
    q: Array, k: Array, v: Array, causal: bool, key_mask: Array | None = None
) -> Array:
    run = _in_pytorch("flash_attention").FlashAttentionFunction.apply
    e = v.shape[-1]
    q, k, v = equally_wide_by_default(q, k, v)
    return run(q, k, v, key_mask, causal, CHUNK, CHUNK)[..., :e]


@IN_PYTORCH.peer(
    "qk_norm[norm=l2](softmax[scale=16.0])",
    library="torch",
    layout="bhtd",
    heads="equal",
    dtypes=HALF32,
)
def cosine_sim_flash_attention(q: Array, k: Array, v: Array) -> Array:
    """Subtracts no maximum, as logits are bounded."""
    module = _in_pytorch("cosine_sim_flash_attention")
    e = v.shape[-1]
    q, k, v = equally_wide(module.l2norm(q), module.l2norm(k), v)
    return module.FlashAttentionFunction.apply(q, k, v, None, 16.0, True, CHUNK, CHUNK)[..., :e]


def _in_jax(file: str) -> ModuleType:
    given.of_einops()
    return IN_JAX.imported(f"flash_attention_jax/{file}.py")


@IN_JAX.peer("softmax", library="jax", layout="bhtd", heads="equal")
def causal_attention(q: Array, k: Array, v: Array) -> Array:
    return _in_jax("attention").causal_attention(q, k, v)


@IN_JAX.peer("softmax", library="jax", layout="bhtd", heads="equal", dtypes=("float32",))
def causal_flash_attention(q: Array, k: Array, v: Array) -> Array:
    """Computes in float32, whatever the dtype of the inputs."""
    e = v.shape[-1]
    q, k, v = equally_wide_by_default(q, k, v)
    return _in_jax("causal_flash_attention").causal_flash_attention(q, k, v)[..., :e]


@IN_JAX.peer(
    "softmax[causal=false]", library="jax", layout="bhtd", heads="equal", dtypes=("float32",)
)
def masked_flash_attention(
    q: Array, k: Array, v: Array, causal: bool, key_mask: Array | None = None
) -> Array:
    if causal:
        raise ValueError("it is not causal")
    if key_mask is None:
        import jax

        key_mask = jax.numpy.ones((k.shape[0], k.shape[2]), dtype=bool)
    e = v.shape[-1]
    q, k, v = equally_wide_by_default(q, k, v)
    return _in_jax("flash_attention").flash_attention(q, k, v, key_mask)[..., :e]


@RING.peer("softmax", library="torch", heads="equal")
def default_attention(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    softcap: float | None,
    key_mask: Array | None = None,
) -> Array:
    if causal and key_mask is not None:
        raise ValueError("it ignores the mask of keys where it is causal")
    names = given.of_pytorch() | given.of_einops()
    more = ("exists", "divisible_by", "softclamp")
    path = "ring_attention_pytorch/ring_attention.py"
    run = RING.excerpt(path, "default_attention", *more, imported=names).default_attention
    return run(q, k, v, key_mask, causal, softcap is not None, softcap or 1.0)


def _rezaei(
    q: Array, k: Array, v: Array, visible: Array, bias: Array | None, **chunks: int
) -> Array:
    """Adapter of a function that requires a mask and a bias of the whole shape (b, h, t, s)."""
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    mask = visible.expand(shape)
    bias = None if bias is None else bias.expand(shape)
    package = REZAEI.imported_from("memory_efficient_attention", "attention_torch")
    return package.efficient_dot_product_attention(q, k, v, mask, bias, **chunks)


@REZAEI.peer("softmax", library="torch", heads="equal")
def efficient_attention_torch(
    q: Array, k: Array, v: Array, visible: Array, bias: Array | None = None
) -> Array:
    return _rezaei(q, k, v, visible, bias)


@REZAEI.peer("softmax", library="torch", heads="equal")
def efficient_attention_torch_in_chunks(
    q: Array, k: Array, v: Array, visible: Array, bias: Array | None = None
) -> Array:
    """The function called with chunks of 16 keys."""
    return _rezaei(q, k, v, visible, bias, key_chunk_size=CHUNK)


@REZAEI.peer("softmax", library="jax", heads="equal")
def efficient_attention_jax(
    q: Array, k: Array, v: Array, visible: Array, bias: Array | None = None
) -> Array:
    """Takes a mask only together with a bias."""
    from jax import numpy as jnp

    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    bias = jnp.broadcast_to(jnp.zeros((), q.dtype) if bias is None else bias, shape)
    run = REZAEI.imported("memory_efficient_attention/attention_jax.py")
    return run.efficient_dot_product_attention(q, k, v, jnp.broadcast_to(visible, shape), bias)
