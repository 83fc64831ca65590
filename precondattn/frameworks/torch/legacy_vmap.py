"""PyTorch's legacy vmap, which maps cotangents, implemented by `torch.vmap`.

`torch.autograd.grad(is_grads_batched=True)` and `torch.autograd.functional.jacobian(
vectorize=True)` use it. A mapped tensor does not show its level. Removing an axis at a level where
it has one gives the axis; at any other level the tensor is expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from precondattn.arrays import Tree

LEVELS = 64

_key = torch._C._dispatch_key_parse("Batched")
_library = torch.library.Library("precondattn", "FRAGMENT")


def register(operator: Tree) -> None:
    """Register a rule of the legacy vmap for an operator that `torch.vmap` can map."""

    def kernel(*arguments: Tree) -> Tree:
        leaves, structure = pytree.tree_flatten(arguments)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def function(*tensors: Tensor) -> Tree:
            arguments = [*leaves]
            for i, tensor in zip(places, tensors, strict=True):
                arguments[i] = tensor
            return operator(*pytree.tree_unflatten(arguments, structure))

        return mapped(function, [leaves[i] for i in places])

    _library.impl(operator._name, kernel, "Batched")


def mapped(function: Callable[..., Tree], tensors: Sequence[Tensor]) -> Tree:
    """`function(*tensors)`, by `torch.vmap` over the axes that the legacy vmap maps."""
    plain, levels = list(tensors), []
    for level in range(1, LEVELS + 1):
        if not any(map(is_mapped, plain)):
            break
        axes = tuple(0 if _is_mapped_at(level, tensor) else None for tensor in plain)
        if 0 in axes:
            for i, axis in enumerate(axes):
                if axis == 0:
                    plain[i] = torch._remove_batch_dim(plain[i], level, 0, 0)
            function = torch.vmap(function, axes)
            levels.append(level)
    results = function(*plain)

    def wrapped(result: Tensor) -> Tensor:
        for outer, level in zip(reversed(range(len(levels))), levels, strict=True):
            result = torch._add_batch_dim(result, outer, level)
        return result

    return pytree.tree_map(wrapped, results)


def is_mapped(tensor: Tensor) -> bool:
    """Whether the legacy vmap maps a tensor."""
    return bool(torch._C._dispatch_keys(tensor).has(_key))


def _is_mapped_at(level: int, tensor: Tensor) -> bool:
    sizes = {torch._remove_batch_dim(tensor, level, n, 0).shape[0] for n in (1, 2)}
    return len(sizes) == 1
