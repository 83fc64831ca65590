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
    if torch.get_float32_matmul_precision() == "highest":
        return exact()
    return "ieee" if is_amd() else "tf32"


def padded_width(width: int) -> int:
    """The power of two, 16 or more, that a tile of this width has."""
    return max(16, 1 << (width - 1).bit_length())
