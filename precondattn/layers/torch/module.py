"""Parameters and linear maps of PyTorch modules, from their declarations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from precondattn.arrays import Device, DType, Shape, is_distributed, namespace
from precondattn.layers.functions import LinearMap
from precondattn.layers.maps import Map, Stored, Weight
from precondattn.layers.parameters import FirstValues

if TYPE_CHECKING:
    from precondattn.layers.torch.divided_weights import DividedWeights

# A type is registered by its first array, which is impossible in compiled code.
for _known in (torch.empty(0, device="cpu"), nn.Parameter(torch.empty(0, device="cpu"))):
    namespace(_known)


class Declared(nn.Module):
    """A module with declarations of its own parameters and those of its linear maps."""

    declared: dict[str, Weight]
    """The parameters by their names in `state_dict`, in the order in which they are drawn."""
    divided_weights: DividedWeights | None = None
    """The division of the parameters among processes; `divide_weights` sets it."""

    def reset_parameters(self) -> None:
        """Initialise the weights again, for example after `to_empty` of a module on `meta`."""
        fill_all(self, self.declared)

    def register_map(self, of_map: Map, device: Device, dtype: DType) -> None:
        """Add the module of a linear map, with uninitialised weights."""
        sizes = prod(of_map.inner), prod(of_map.outer)
        module = empty_linear(*sizes, is_biased=bool(of_map.bias), device=device, dtype=dtype)
        self.add_module(of_map.name, module)

    def declare_stored(self, kind: str, of_map: Map, start: FirstValues) -> None:
        """Declare the weight or the bias of a linear map."""
        stored = Stored(of_map, is_bias=kind == "bias", outer_first=True)
        self.declared[f"{of_map.name}.{kind}"] = stored.weight(start)


class PartOfMap(LinearMap):
    """The part of a linear map that one of several processes computes."""

    def __init__(self, of_map: Map, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(of_map, lambda x: nn.functional.linear(x, weight, bias))


def register(module: nn.Module, name: str, weight: Weight, device: Device, dtype: DType) -> None:
    """Add an uninitialised parameter to a module."""
    empty = torch.empty(weight.shape, device=device, dtype=dtype)
    module.register_parameter(name, nn.Parameter(empty))


def empty_linear(
    inner: int, outer: int, *, is_biased: bool, device: Device, dtype: DType
) -> nn.Linear:
    """An uninitialised `nn.Linear`."""
    # On the device meta a module does not draw initial values.
    module = nn.Linear(inner, outer, bias=is_biased, device="meta")
    for name, parameter in [*module.named_parameters()]:
        empty = torch.empty(parameter.shape, device=device, dtype=dtype)
        module.register_parameter(name, nn.Parameter(empty))
    return module


def fill_all(module: nn.Module, weights: Mapping[str, Weight]) -> None:
    """Draw the initial values of these parameters of a module."""
    for name, weight in weights.items():
        fill(module.get_parameter(name), weight)


@torch.no_grad()
def fill(parameter: Tensor, weight: Weight) -> None:
    """Draw the initial values of a parameter, which may be a DTensor."""
    kind = {"dtype": parameter.dtype, "device": parameter.device}
    values: Tensor = weight.start(_Draw(weight.shape, kind), weight.shape)
    if is_distributed((parameter,), {}):
        from torch.distributed.tensor import Replicate, distribute_tensor

        whole: Tensor = parameter
        # Two steps: PyTorch can not distribute to unequal parts along two axes at once.
        same = distribute_tensor(values, whole.device_mesh, [Replicate()] * whole.device_mesh.ndim)
        values = same.redistribute(placements=whole.placements)
    parameter.copy_(values)


def parameters_of(module: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """The parameters of a module by name; they may be parametrized."""
    parameters = module._parameters  # Attributes of modules are slow to read.
    return {
        name: parameters[name] if name in parameters else getattr(module, name) for name in names
    }


class _Draw:
    """A source of tensors of one shape, with the dtype and device of a parameter."""

    def __init__(self, shape: Shape, kind: dict[str, object]) -> None:
        self.shape, self.kind = shape, kind

    def of_shape(self, shape: Shape) -> _Draw:
        return _Draw(shape, self.kind)

    def normal(self) -> Tensor:
        return torch.randn(self.shape, **self.kind)

    def uniform(self) -> Tensor:
        return torch.rand(self.shape, **self.kind)

    def constant(self, value: float) -> Tensor:
        return torch.full(self.shape, value, **self.kind)

    def identity(self) -> Tensor:
        return torch.eye(self.shape[-1], **self.kind).expand(self.shape)
