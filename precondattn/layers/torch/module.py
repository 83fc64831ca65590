"""Parameters and linear maps of PyTorch modules: declared, drawn, and converted from Flax."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from precondattn.arrays import Device, DType, Shape, Tree, is_distributed, namespace
from precondattn.layers.functions import LinearMap
from precondattn.layers.maps import Map, Weight
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

    def add_map(
        self, of_map: Map, starts: Mapping[str, FirstValues], device: Device, dtype: DType
    ) -> None:
        """Add the module of a linear map, and declare its "weight" and "bias"."""
        sizes = prod(of_map.inner), prod(of_map.outer)
        module = empty_linear(*sizes, is_biased="bias" in starts, device=device, dtype=dtype)
        self.add_module(of_map.name, module)
        for kind, start in starts.items():
            declared = of_map.parameter(start, is_bias=kind == "bias", outer_first=True)
            self.declared[f"{of_map.name}.{kind}"] = declared


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
    values: Tensor = weight.start(_Draw(kind), weight.shape)
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
    """A source of tensors with the dtype and device of a parameter."""

    def __init__(self, kind: dict[str, object]) -> None:
        self.kind = kind

    def normal(self, shape: Shape) -> Tensor:
        return torch.randn(shape, **self.kind)

    def uniform(self, shape: Shape) -> Tensor:
        return torch.rand(shape, **self.kind)

    def constant(self, shape: Shape, value: float) -> Tensor:
        return torch.full(shape, value, **self.kind)

    def identity(self, shape: Shape) -> Tensor:
        return torch.eye(shape[-1], **self.kind).expand(shape)


def to_torch(state: Mapping[Tree, Tree]) -> dict[str, torch.Tensor]:
    """The `state_dict` from a nested dict of arrays, such as `nnx.state(module, nnx.Param)`.

    The names are the same in both, except for linear maps: `q_proj`, `kernel` (x, y) of an
    `nnx.Linear` becomes `"q_proj.weight"` (y, x) of an `nn.Linear`.

    Examples
    --------
    >>> import numpy as np
    >>> from precondattn.layers.torch import to_torch
    >>> to_torch({"blocks": {0: {"q_proj": {"kernel": np.ones((2, 1))}}}})
    {'blocks.0.q_proj.weight': tensor([[1., 1.]], dtype=torch.float64)}
    """
    tensors = {}
    for path, array in _leaves(state, ()):
        *before, last = map(str, path)
        tensor = _tensor(array)
        if last == "kernel" and before and before[-1].endswith("_proj"):
            last, tensor = "weight", tensor.mT.contiguous()
        tensors[".".join([*before, last])] = tensor
    return tensors


def _leaves(state: Tree, path: tuple[object, ...]) -> Iterable[tuple[tuple[object, ...], Tensor]]:
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _leaves(value, (*path, key))
    else:
        yield path, state


def _tensor(value: Tensor) -> torch.Tensor:
    array = np.asarray(value[...])
    if array.dtype.name == "bfloat16":  # PyTorch can not read NumPy's bfloat16.
        return torch.tensor(array.astype(np.float32), device="cpu").bfloat16()
    return torch.tensor(array, device="cpu")
