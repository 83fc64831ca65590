"""Parameters of a module of PyTorch, from their declarations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from precondattn.arrays import is_distributed
from precondattn.layers.plan import Weight


def register(module: nn.Module, name: str, weight: Weight, device: Any, dtype: Any) -> None:
    """A parameter of the module that is not filled yet."""
    empty = torch.empty(weight.shape, device=device, dtype=dtype)
    module.register_parameter(name, nn.Parameter(empty))


@torch.no_grad()
def fill(parameter: Tensor, weight: Weight) -> None:
    """Draw the first values of a parameter, which may be a DTensor."""
    values: Any = weight.start(_Draw(parameter), weight.shape)
    if is_distributed((parameter,), {}):
        from torch.distributed.tensor import distribute_tensor

        whole: Any = parameter
        values = distribute_tensor(values, whole.device_mesh, whole.placements)
    parameter.copy_(values)


class _Draw:
    """New tensors of the shape, dtype and device of one parameter."""

    def __init__(self, parameter: Tensor) -> None:
        self.shape = parameter.shape
        self.kind = {"dtype": parameter.dtype, "device": parameter.device}

    def normal(self) -> Tensor:
        return torch.randn(self.shape, **self.kind)

    def uniform(self) -> Tensor:
        return torch.rand(self.shape, **self.kind)

    def constant(self, value: float) -> Tensor:
        return torch.full(self.shape, value, **self.kind)

    def identity(self) -> Tensor:
        return torch.eye(self.shape[-1], **self.kind).expand(self.shape)
