"""Parameters of a module of PyTorch, from their declarations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from precondattn.arrays import is_distributed, namespace
from precondattn.layers.plan import Weight

if TYPE_CHECKING:
    from precondattn.layers.torch.divided_weights import DividedWeights

# A type is recognised by the first array of it, which compiled code can not do.
for _known in (torch.empty(0, device="cpu"), nn.Parameter(torch.empty(0, device="cpu"))):
    namespace(_known)


class Declared(nn.Module):
    """A module whose own parameters are declared."""

    declared: dict[str, Weight]
    """By their names in its `state_dict`"""
    divided_weights: DividedWeights | None = None
    """How they are divided among processes; `divide_weights` sets it."""

    def reset_parameters(self) -> None:
        """Draw the weights anew, for example after `to_empty` of a module made on `meta`."""
        for name, weight in self.declared.items():
            fill(self.get_parameter(name), weight)


def register(module: nn.Module, name: str, weight: Weight, device: Any, dtype: Any) -> None:
    """A parameter of the module that is not filled yet."""
    empty = torch.empty(weight.shape, device=device, dtype=dtype)
    module.register_parameter(name, nn.Parameter(empty))


@torch.no_grad()
def fill(parameter: Tensor, weight: Weight) -> None:
    """Draw the first values of a parameter, which may be a DTensor."""
    values: Any = weight.start(_Draw(parameter), weight.shape)
    if is_distributed((parameter,), {}):
        from torch.distributed.tensor import Replicate, distribute_tensor

        whole: Any = parameter
        # In two steps: the engine does not distribute to parts of several sizes along two axes.
        same = distribute_tensor(values, whole.device_mesh, [Replicate()] * whole.device_mesh.ndim)
        values = same.redistribute(placements=whole.placements)
    parameter.copy_(values)


def parameters_of(module: nn.Module, declared: Iterable[tuple[str, Weight]]) -> dict[str, Tensor]:
    """The parameters of a module by name, which may be parametrized."""
    own = module._parameters  # Attributes of modules are slow to read.
    return {name: own[name] if name in own else getattr(module, name) for name, _ in declared}


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
