"""How products are done: the dtype of their factors, and what becomes of factors in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_compiling_for_amd: bool | None = None


def is_amd() -> bool:
    """Whether kernels are for AMD's GPUs: those of this PyTorch, unless told otherwise."""
    return torch.version.hip is not None if _compiling_for_amd is None else _compiling_for_amd


@contextmanager
def compiling_for(amd: bool) -> Iterator[None]:
    """Kernels for a GPU that is not here."""
    global _compiling_for_amd
    before, _compiling_for_amd = _compiling_for_amd, amd
    try:
        yield
    finally:
        _compiling_for_amd = before


def exact() -> str:
    """Of float32 factors, with float32's accuracy: three products of tf32, where there is one."""
    return "ieee" if is_amd() else "tf32x3"


def as_the_user_allows() -> str:
    """Of float32 factors: tf32 only where PyTorch may use it too."""
    matmul = torch.backends.cuda.matmul
    # Newer versions refuse to answer in the old words what was said in the new ones.
    is_new = hasattr(matmul, "fp32_precision")
    allowed = matmul.fp32_precision == "tf32" if is_new else matmul.allow_tf32
    return sixteen_bits() if allowed else exact()


def sixteen_bits() -> str:
    """Of float32 factors that stand for numbers of 16 bits: tf32 has no fewer digits than they."""
    return "ieee" if is_amd() else "tf32"


def is_half(dtype: torch.dtype) -> bool:
    """Whether tf32 is enough, and kernels are cut for it.

    Of the 11 bits that tf32 and float16 have, tensor cores read 10 and round none: where sums
    cancel, that is too few for float16.
    """
    return dtype == torch.bfloat16


def product_precision(dtype: torch.dtype) -> str:
    """How factors in float32 are multiplied, for inputs of this dtype."""
    return sixteen_bits() if is_half(dtype) else as_the_user_allows()


def padded_width(width: int) -> int:
    """The power of two, 16 or more, that a tile of this width has."""
    return max(16, 1 << (width - 1).bit_length())
