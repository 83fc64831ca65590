"""PyTorch: the dtype and memory of the tensors that operators return."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from precondattn.execution.array_checks import values_of


def output_dtype(
    inputs: dict[str, Tensor], *, is_wide: bool, has_gradient: bool = False
) -> torch.dtype:
    """The dtype of a piece's output: v's dtype, or float32 for half precision if `is_wide`.

    An output with a gradient is never in float16, so that its cotangent is not (`cotangents.py`).
    """
    dtype = values_of(inputs).dtype
    if dtype == torch.bfloat16 and is_wide:
        return torch.float32
    return torch.float32 if dtype == torch.float16 and (is_wide or has_gradient) else dtype


def unaliased(outputs: Sequence[Tensor], inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """The outputs; one that shares memory with an input or another output is copied."""
    used = {t.untyped_storage().data_ptr() for t in inputs if t is not None}
    unaliased = []
    for output in outputs:
        if output.untyped_storage().data_ptr() in used:
            output = output.clone()
        used.add(output.untyped_storage().data_ptr())
        unaliased.append(output.contiguous())
    return unaliased
