"""References of softmax kernels, and attention in chunks with a running maximum."""

from __future__ import annotations

from functools import partial
from types import ModuleType

from precondattn.arrays import Array
from precondattn_conformance.peers.arrays import (
    HALF32,
    Foreign,
    equally_wide,
    equally_wide_by_default,
    scale_of,
)
from precondattn_conformance.peers.files import names_of
from precondattn_conformance.peers.project import Project, on_github

# FlashAttention: the PyTorch references against which its kernels are tested.

FLASH_ATTENTION = on_github(
    "Dao-AILab/flash-attention@0251105a2fb19d2957484b7f023cd8c115286ced",
    "2026-08-15",
    "FlashAttention",
    "flash-attention",
)


def _attention_ref(
    is_cute: bool,
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    window: int | None,
    softcap: float | None,
    bias: Array | None,
    sink: Array | None = None,
) -> Array:
    """Adds the bias after the softcap; a window of w keys is given as (w − 1, 0).

    CuTe's computes in the dtype of its inputs, as `upcast` is not set. The key mask is not passed:
    with it, queries would be aligned with the last unmasked key.
    """
    path, masks = "tests/test_flash_attn.py", ["construct_local_mask"]
    unlimited = None if is_cute else -1
    options: dict[str, Foreign] = {"attn_bias": bias, "softcap": softcap or 0.0}
    if is_cute:
        path, masks = "flash_attn/cute/testing.py", [*masks, "construct_chunk_mask"]
        options |= {"learnable_sink": sink, "upcast": False}
    run = FLASH_ATTENTION.defined(path, "attention_ref", *masks, given="torch einops")
    sides = (unlimited if window is None else window - 1, 0 if causal else unlimited)
    return run(q, k, v, window_size=sides, **options)[0]


_load: Foreign = partial(partial, _attention_ref)
_takes = "q k v causal window softcap bias?"
FLASH_ATTENTION.direct("attention_ref", "softmax", partial(_load, False), _takes, dtypes=HALF32)
FLASH_ATTENTION.direct("cute_attention_ref", "softmax", partial(_load, True), f"{_takes} sink=?")


# Tokamax: the plain JAX implementations against which its kernels are tested.

TOKAMAX = Project("tokamax", "Tokamax", "https://github.com/openxla/tokamax", package="tokamax")


def _attention(*arrays: Array | None, **options: Foreign) -> Array:
    *_, bias, _ = arrays
    if bias is not None and options.get("logits_soft_cap") is not None:
        raise ValueError("it caps the logits with their bias, and ours are capped before it")
    return TOKAMAX.imported("tokamax").dot_product_attention(*arrays, **options)


@TOKAMAX.peer("softmax", library="jax")
def xla_is_causal(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> Array:
    # Here the window includes the token itself; Tokamax counts the tokens on each side of it.
    near = None if window is None else (window - 1, 0 if causal else window - 1)
    options: dict[str, Foreign] = {"is_causal": causal, "local_window_size": near}
    return _attention(q, k, v, None, None, **options, scale=scale, implementation="xla")


def _capped(
    implementation: str,
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    scale: float | None,
    softcap: float | None,
    bias: Array | None,
) -> Array:
    options: dict[str, Foreign] = {"scale": scale, "logits_soft_cap": softcap}
    return _attention(q, k, v, bias, visible, **options, implementation=implementation)


for _name in ("xla", "xla_chunked"):  # Chunks have 512 queries and 1,024 keys.
    _load, _takes = partial(partial, _capped, _name), "q k v visible scale softcap bias?"
    TOKAMAX.direct(_name, "softmax", _load, _takes, library="jax")


@TOKAMAX.peer("softmax", library="jax")
def flex_attention(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    scale: float | None,
    softcap: float | None,
    bias: Array | None = None,
) -> Array:
    import jax.numpy as jnp

    factor = scale_of(q, scale)

    def score(logits: Array) -> Array:
        logits = logits * factor
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        return logits if bias is None else logits + bias

    attend = TOKAMAX.imported("tokamax._src.ops.flex_attention.base").FlexAttention()
    return attend(q, k, v, score_mod=score, mask_mod=lambda shape: jnp.broadcast_to(visible, shape))


# xFormers: the reference against which its kernels are tested, with its attention biases.
#
# It computes and returns float32.

XFORMERS = Project(
    "xformers", "xFormers", "https://github.com/facebookresearch/xformers", package="xformers"
)


def _ref(q: Array, k: Array, v: Array, bias: Foreign, scale: float | None) -> Array:
    attend = XFORMERS.imported("xformers.attn_bias_utils").ref_attention_bmhk
    return attend(q, k, v, bias, scale_of(q, scale)).to(q.dtype)


def _biases() -> Foreign:
    return XFORMERS.imported("xformers.ops.fmha.attn_bias")


@XFORMERS.peer("softmax", heads="equal", dtypes=HALF32)
def ref_attention(
    q: Array, k: Array, v: Array, visible: Array, scale: float | None, bias: Array | None = None
) -> Array:
    import torch

    low = torch.full((), -torch.inf, dtype=q.dtype)
    added = torch.zeros((), dtype=q.dtype) if bias is None else bias
    shape = (q.shape[0], q.shape[2], *visible.shape[2:])
    whole = torch.where(visible, added, low).expand(shape)
    return _ref(q, k, v, whole.flatten(0, 1), scale)


@XFORMERS.peer("softmax", heads="equal", dtypes=HALF32)
def lower_triangular_from_bottom_right(
    q: Array, k: Array, v: Array, causal: bool, window: int | None, scale: float | None
) -> Array:
    if not causal and window is not None:
        raise ValueError("a window of its bias is causal")
    bias = _biases().LowerTriangularFromBottomRightMask() if causal else None
    if bias is not None and window is not None:
        bias = bias.make_local_attention(window)
    return _ref(q, k, v, bias, scale)


@XFORMERS.peer("softmax", heads="equal", dtypes=HALF32)
def lower_triangular(q: Array, k: Array, v: Array, causal: bool, scale: float | None) -> Array:
    bias = _biases().LowerTriangularMask() if causal else None
    return _ref(q, k, v, bias, scale)


# Attention in chunks with a running maximum, as it was published in plain PyTorch and JAX.

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
CHUNK = 16
"""The number of keys and queries in a chunk. The originals have 512 and 1024, for longer sequences
than are compared here."""


def _in_pytorch(file: str) -> ModuleType:
    names_of("einops")
    return IN_PYTORCH.imported(f"memory_efficient_attention_pytorch/{file}.py")


def _memory_efficient(
    function: str,
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    bias: Array | None,
    key_mask: Array | None,
    **options: float,
) -> Array:
    run = getattr(_in_pytorch("memory_efficient_attention"), function)
    return run(q, k, v, mask=key_mask, causal=causal, attn_bias=bias, **options)


_options: Foreign
for _name, _options in (
    ("attention", {}),
    (
        "memory_efficient_attention",
        {"q_bucket_size": CHUNK, "k_bucket_size": CHUNK, "eps": 0.0},
    ),
):
    _load, _takes = partial(partial, _memory_efficient, _name, **_options), "q k v causal"
    _arrangement: Foreign = {"library": "torch", "layout": "bhtd", "heads": "equal"}
    IN_PYTORCH.direct(_name, "softmax", _load, f"{_takes} bias? key_mask?", **_arrangement)


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
    names_of("einops")
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
    path, more = "ring_attention_pytorch/ring_attention.py", ("exists", "divisible_by", "softclamp")
    run = RING.defined(path, "default_attention", *more, given="torch einops")
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


for _name, _chunks in (
    ("efficient_attention_torch", {}),
    ("efficient_attention_torch_in_chunks", {"key_chunk_size": CHUNK}),
):
    _load, _arrangement = partial(partial, _rezaei, **_chunks), {"heads": "equal"}
    REZAEI.direct(_name, "softmax", _load, "q k v visible bias?", **_arrangement)


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
