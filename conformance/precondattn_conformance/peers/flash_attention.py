"""FlashAttention: the PyTorch references against which its kernels are tested."""

from __future__ import annotations

from functools import cache

from precondattn.arrays import Array
from precondattn_conformance.peers import given
from precondattn_conformance.peers.arrays import HALF32, Foreign
from precondattn_conformance.peers.project import on_github

FLASH_ATTENTION = on_github(
    "Dao-AILab/flash-attention@0251105a2fb19d2957484b7f023cd8c115286ced",
    "2026-08-15",
    "FlashAttention",
    "flash-attention",
)
ALL = (FLASH_ATTENTION,)


@cache
def _reference(path: str, *more: str) -> Foreign:
    names = given.of_pytorch() | given.of_einops()
    return FLASH_ATTENTION.excerpt(path, "attention_ref", *more, imported=names).attention_ref


@FLASH_ATTENTION.peer("softmax", library="torch", dtypes=HALF32)
def attention_ref(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    window: int | None,
    softcap: float | None,
    bias: Array | None = None,
) -> Array:
    """Adds the bias after the softcap; a window of w keys is given as (w − 1, 0).

    The key mask is not passed: with it, queries would be aligned with the last unmasked key.
    """
    sides = (-1 if window is None else window - 1, 0 if causal else -1)
    run = _reference("tests/test_flash_attn.py", "construct_local_mask")
    return run(
        q,
        k,
        v,
        attn_bias=bias,
        window_size=sides,
        softcap=softcap or 0.0,
    )[0]


@FLASH_ATTENTION.peer("softmax", library="torch")
def cute_attention_ref(
    q: Array,
    k: Array,
    v: Array,
    causal: bool,
    window: int | None,
    softcap: float | None,
    bias: Array | None = None,
    sink: Array | None = None,
) -> Array:
    """Computes in the dtype of its inputs, because `upcast` is not set."""
    sides = (None if window is None else window - 1, 0 if causal else None)
    run = _reference("flash_attn/cute/testing.py", "construct_local_mask", "construct_chunk_mask")
    return run(
        q,
        k,
        v,
        attn_bias=bias,
        window_size=sides,
        softcap=softcap or 0.0,
        learnable_sink=sink,
        upcast=False,
    )[0]
