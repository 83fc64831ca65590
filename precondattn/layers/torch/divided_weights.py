"""Layers whose weights are divided among processes: tensor parallelism.

Every process has the same tokens, and computes with its heads, its channels of the MLPs and its
rows of the vocabulary (`precondattn/layers/shares.py`). Its part of a weight is a tensor in its
layer, and a DTensor in the model's parameters, which FSDP2, optimizers and checkpoints support.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import Module

from precondattn.arrays import is_distributed
from precondattn.layers.plan import LayerPlan
from precondattn.layers.shares import Share, plan_of_device, share_of
from precondattn.layers.torch.module import Declared, PartOfMap

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from precondattn.layers.maps import Map

OWNER = "divide_weights"
CONTIGUOUS = torch.contiguous_format


def divide_weights(model: Module, mesh: DeviceMesh) -> None:
    """Divide the weights of a model among the processes of a mesh: tensor parallelism.

    Before, every process has all weights of the model. Afterwards it has its parts, as DTensors of
    this mesh. All processes then call the model with the same tokens, and get the same output. The
    heads of every `Attention`, the inner channels of the MLPs of `Block`, and the vocabulary of a
    `Decoder` are divided. Norms are whole on every process, and other modules are unchanged.

    Call it before `fully_shard`, which gets the other dimensions of the same mesh, and before the
    optimizer is created. `divide_tokens`, on another dimension, may come before or after it.

    Parameters
    ----------
    model : nn.Module
        A model with such layers, such as a `Decoder`, or one `Attention`.
    mesh : DeviceMesh
        A mesh of one dimension.

    Raises
    ------
    TypeError, ValueError
        on all processes: for a model without such layers, or one that is already divided; for a
        mesh of several dimensions, or with the processes of `divide_tokens`; for heads, inner
        channels or a vocabulary that can not be divided; and for linear maps with adapters or
        quantized weights. There may be fewer key/value heads than processes, if their number
        divides the number of processes.

    Examples
    --------
    In each of eight processes started by `torchrun`:

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.fsdp import fully_shard
    >>> from precondattn.layers.torch import Decoder, divide_tokens, divide_weights
    >>> names = ("dp", "cp", "tp")
    >>> mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)  # doctest: +SKIP
    >>> model = Decoder(100, 32, heads=4, layers=["lucid", "gated_delta"])
    >>> divide_weights(model, mesh["tp"])  # doctest: +SKIP
    >>> divide_tokens(model, mesh["cp"], layout="contiguous")  # doctest: +SKIP
    >>> model = fully_shard(model, mesh=mesh["dp", "cp"])  # doctest: +SKIP
    """
    from precondattn.parallel.torch.processes import check_mesh, processes_of

    check_mesh(OWNER, mesh, "mesh['tp']")
    modules = {
        name: module for name, module in model.named_modules() if isinstance(module, Declared)
    }
    divided, error = {}, None
    try:
        divided = {name: _divided(name, module, mesh) for name, module in modules.items()}
        for module in modules.values():
            if getattr(module, "divided", None) is not None:
                check_apart(OWNER, mesh, module.divided.mechanism.mesh)
        if all(of_module.is_whole for of_module in divided.values()):
            raise ValueError(f"model has no Attention; found {type(model).__name__}")
    except (TypeError, ValueError) as raised:
        error = raised
    shapes = [f"{name} {tuple(p.shape)}" for name, p in model.named_parameters()]
    processes_of(OWNER, mesh).agree(error, "; ".join(shapes))
    for name, module in modules.items():
        _distribute(module, divided[name])


def _divided(name: str, module: Declared, mesh: DeviceMesh) -> DividedWeights:
    """The division of a module's weights, which are still whole."""
    if is_distributed(tuple(module.parameters()), {}):
        raise ValueError(
            "parameters are DTensors already; it comes before fully_shard, and only once"
        )
    for child_name, child in module.named_children():
        if f"{child_name}.weight" in module.declared:
            path = f"{name}.{child_name}" if name else child_name
            check_plain(path, child)
            if type(child.weight) not in (Tensor, nn.Parameter):
                raise TypeError(
                    f"{path}.weight must be an ordinary tensor, of which each process takes a "
                    f"part; found {type(child.weight).__name__}"
                )
    devices, device = mesh.size(), mesh.get_local_rank()
    plan = getattr(module, "plan", None)
    try:
        of_device = plan_of_device(plan, devices) if isinstance(plan, LayerPlan) else None
        shares = {
            key: share_of(key, weight, devices, device) for key, weight in module.declared.items()
        }
    except ValueError as error:
        raise ValueError(f"{name}: {error}" if name else str(error)) from None
    return DividedWeights(mesh, shares, of_device)


@torch.no_grad()
def _distribute(module: Declared, divided: DividedWeights) -> None:
    """Make a module's parameters DTensors, with the values of the first process."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for name, share in divided.shares.items():
        parameter = module.get_parameter(name)
        placement = Shard(share.axis) if share.is_sharded else Replicate()
        part = distribute_tensor(parameter, divided.mesh, [placement])
        path, _, last = name.rpartition(".")
        new = nn.Parameter(part, requires_grad=parameter.requires_grad)
        module.get_submodule(path).register_parameter(last, new)
    module.divided_weights = divided


def check_apart(owner: str, mesh: DeviceMesh, other: DeviceMesh) -> None:
    """Raise an error if the processes that divide tokens also divide weights."""
    both = {*mesh.mesh.flatten().tolist()} & {*other.mesh.flatten().tolist()}
    if len(both) > 1:
        raise ValueError(
            f"{owner}: tokens and weights must be divided along two dimensions of a mesh; found "
            f"the processes {sorted(both)} in {mesh} and in {other}"
        )


def check_plain(name: str, module: Module) -> None:
    """Raise an error for a linear map whose module can not be called in parts."""
    kind, found = type(module), "hooks"
    if kind is not nn.Linear:
        found = f"{kind.__module__}.{kind.__qualname__}"
    elif not (module._forward_pre_hooks or module._forward_hooks):
        return
    raise TypeError(
        f"{name} must be an nn.Linear without hooks or adapters, since each process computes a "
        f"part of it; found {found}"
    )


class DividedWeights:
    """The division of a module's weights among processes."""

    def __init__(
        self, mesh: DeviceMesh, shares: Mapping[str, Share], plan: LayerPlan | None
    ) -> None:
        self.mesh, self.shares = mesh, shares
        self.plan = plan
        """The plan with this process's heads, if the module is an `Attention`."""

    def __deepcopy__(self, memo: dict[int, object]) -> DividedWeights:
        return self  # The processes of a copy are the same.

    @property
    def is_whole(self) -> bool:
        return all(share.axis is None for share in self.shares.values())

    def check_same(self, arrays: Mapping[str, Tensor], error: Exception | None) -> None:
        """Raise an error on all processes if one has an error, or if their arrays differ."""
        from precondattn.parallel.torch.processes import processes_of

        said = ", ".join(f"{name} {_digest(array)}" for name, array in arrays.items())
        processes_of(OWNER, self.mesh).agree(error, said)

    def of_first(self, x: Tensor) -> Tensor:
        """The x of the first process."""
        x = x.contiguous()
        torch.distributed.broadcast(x, group=self.mesh.get_group(), group_src=0)
        return x

    def part(self, name: str, parameter: Tensor, *, is_term: bool = True) -> Tensor:
        """This process's part of a DTensor, with which it computes.

        If all processes have the whole weight, `is_term` says whether the gradient computed here is
        one term of its gradient.
        """
        share = self.shares[name]
        if not hasattr(parameter, "to_local"):
            raise TypeError(
                f"{OWNER}: {name} must be the DTensor that it made; "
                f"found {type(parameter).__name__}"
            )
        local: Tensor = parameter.to_local()
        if share.is_sharded or not is_term:
            return local
        local = self.entering(local)
        if share.axis is None:
            return local
        return local.narrow(
            share.axis, share.indices.start, share.indices.stop - share.indices.start
        )

    def part_of_map(self, of_map: Map, module: Module, *, with_bias: bool = True) -> PartOfMap:
        """The part of a linear map that this process computes."""
        name = of_map.name
        check_plain(f"{OWNER}: {name}", module)
        bias = module.bias if with_bias else None
        if bias is not None:
            bias = self.part(f"{name}.bias", bias)
        return PartOfMap(of_map, self.part(f"{name}.weight", module.weight), bias)

    def entering(self, x: Tensor) -> Tensor:
        """x, which is the same on all processes; its gradient is summed over processes."""
        return _Entering.apply(self.mesh.get_group(), x)

    def total(self, y: Tensor) -> Tensor:
        """The sum of y over all processes."""
        return _Total.apply(self.mesh.get_group(), y)

    def gathered(self, y: Tensor) -> Tensor:
        """The y of all processes, concatenated along the last axis."""
        return _GatheredWeight.apply(self.mesh, y)


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, group: ProcessGroup, x: Tensor) -> Tensor:
        ctx.group = ref(group)  # A graph must not keep a destroyed group alive.
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, d_x: Tensor) -> tuple[Tensor | None, ...]:
        return None, _sum(ctx.group(), d_x)


class _Total(torch.autograd.Function):
    """The sum over processes; its gradient is the same on all processes."""

    @staticmethod
    def forward(ctx: FunctionCtx, group: ProcessGroup, y: Tensor) -> Tensor:
        return _sum(group, y)

    @staticmethod
    def backward(ctx: FunctionCtx, d_y: Tensor) -> tuple[Tensor | None, ...]:
        return None, d_y


class _GatheredWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, mesh: DeviceMesh, y: Tensor) -> Tensor:
        ctx.rank, ctx.size = mesh.get_local_rank(), y.shape[-1]
        parts = [torch.empty_like(y, memory_format=CONTIGUOUS) for _ in range(mesh.size())]
        torch.distributed.all_gather(parts, y.contiguous(), group=mesh.get_group())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: FunctionCtx, d_y: Tensor) -> tuple[Tensor | None, ...]:
        return None, d_y.narrow(-1, ctx.rank * ctx.size, ctx.size)


def _sum(group: ProcessGroup, x: Tensor) -> Tensor:
    total = x.clone(memory_format=CONTIGUOUS)
    torch.distributed.all_reduce(total, group=group)
    return total


def _digest(array: Tensor) -> str:
    """A short text that almost surely differs between different arrays."""
    if not isinstance(array, Tensor):
        return type(array).__name__
    numbers = array.detach().flatten().to(torch.int64)
    index = torch.arange(1, numbers.numel() + 1, device=numbers.device)
    mixed = (numbers + 1) * (index * 0x9E3779B1 % 2**31)
    return f"{tuple(array.shape)} with the digest {int(mixed.sum())}"
