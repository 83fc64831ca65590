"""The precision of products: the dtype of factors, and how float32 factors are multiplied."""

from __future__ import annotations

import torch

from precondattn.kernel_backend.precise import is_precise
from precondattn_triton.target import is_amd


def exact() -> str:
    """Float32 factors at float32's accuracy: three tf32 products, where the GPU has tf32."""
    return "ieee" if is_amd() else "tf32x3"


def as_the_user_allows() -> str:
    """Float32 factors as tf32 if PyTorch's settings allow it, else at float32's accuracy."""
    allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return sixteen_bits() if allowed else exact()


def sixteen_bits() -> str:
    """Float32 factors whose values are 16-bit numbers, as tf32: it has at least as many digits."""
    return "ieee" if is_amd() else "tf32"


def is_half(dtype: torch.dtype) -> bool:
    """Whether float32 factors are multiplied as tf32, and kernels are tiled for it.

    tf32 has no fewer bits than either 16-bit dtype. Tensor cores do not round to them: where sums
    cancel, a precise kernel in float16 takes three products.
    """
    return dtype == torch.bfloat16 or (dtype == torch.float16 and not is_precise())


def product_precision(dtype: torch.dtype) -> str:
    """How factors in float32 are multiplied, for inputs of this dtype."""
    return sixteen_bits() if is_half(dtype) else as_the_user_allows()


def splits_weights(dtype: torch.dtype) -> bool:
    """Whether weights and their gradients are sums of two numbers of this dtype."""
    return dtype == torch.bfloat16 and is_precise()
