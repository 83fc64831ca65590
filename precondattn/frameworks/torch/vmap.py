"""The vmap rule of the operators: mapped calls are made one after another."""

from __future__ import annotations

import torch
from torch import Tensor

from precondattn.arrays import Tree
from precondattn.frameworks.torch import operators


def _of_call(argument: Tree, axis: Tree, number: int) -> Tree:
    """An argument of one of the calls; zeros if there are no calls."""
    if isinstance(argument, list):
        return [_of_call(*each, number) for each in zip(argument, axis, strict=True)]
    if axis is None:
        return argument
    if argument.shape[axis] == 0:
        return argument.sum(axis).to(argument.dtype)
    return argument.select(axis, number)


def _register(operator: Tree) -> None:
    def rule(info: Tree, axes: Tree, *arguments: Tree) -> tuple[Tree, Tree]:
        count = info.batch_size
        calls = [
            operator(*(_of_call(*each, i) for each in zip(arguments, axes, strict=False)))
            for i in range(max(count, 1))  # With no calls, one gives the shapes.
        ]
        if isinstance(calls[0], Tensor):
            return torch.stack(calls)[:count], 0
        results = [torch.stack(same)[:count] for same in zip(*calls, strict=True)]
        return results, [0] * len(results)

    operator.register_vmap(rule)


for _name in ("inference", "forward", "backward", "step", "step_backward", "extension"):
    _register(getattr(operators, _name))
