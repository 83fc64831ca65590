"""PyTorch: a move of rows whose gradient is the move back.

The gradient of PyTorch's own `index_select` adds rows one after another.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from precondattn.arrays import Tree
from precondattn.execution.packed import MovedRows, taken


class Moved(torch.autograd.Function):  # type: ignore[misc]
    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, *rows: Tensor | None) -> Tensor:
        return taken(tensor, MovedRows(*rows))

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: Tree, output: Tree) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: FunctionCtx, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        back = MovedRows(*ctx.saved_tensors).back
        return Moved.apply(cotangent, *back), None, None, None, None
