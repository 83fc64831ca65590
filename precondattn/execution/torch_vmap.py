"""vmap of PyTorch's operators: the mapped axis is folded into the batch axis.

Calls are made one after another where that is not the same: where an input without a batch axis,
such as a weight, is mapped, and where sequences of a batch depend on each other. The gradient of a
mapped call works the same way. Several cotangents at once are refused by PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from precondattn.algebra.names import piece_named
from precondattn.execution.torch_operators import forward, inference


def _is_foldable(axes: Any, piece: str) -> bool:
    """Whether the mapped calls are one call with a longer batch."""
    mechanism = piece_named(piece)
    if mechanism.mixes_sequences:
        return False
    has_batch = [pattern.letters[:1] == "b" for pattern in mechanism.inputs.values()]
    return all(has or axis is None for has, axis in zip(has_batch, axes[2], strict=True))


def _calls(info: Any, axes: Any, tensors: Any, frame: Any) -> Iterator[tuple[Any, Any]]:
    """Tensors and frame of each of the mapped calls."""

    def at(i: int, given: Any, of: Any) -> list[Tensor | None]:
        return [
            tensor if tensor is None or axis is None else tensor.select(axis, i)
            for tensor, axis in zip(given, of, strict=True)
        ]

    for i in range(info.batch_size):
        yield at(i, tensors, axes[2]), at(i, frame, axes[3])


def _fold(count: int, tensor: Tensor | None, axis: int | None, has_batch: bool) -> Tensor | None:
    """A mapped tensor with the mapped axis folded into its batch axis, which comes first."""
    if tensor is None or not has_batch:
        return tensor
    tensor = (
        tensor.movedim(axis, 0)
        if axis is not None
        else tensor.unsqueeze(0).expand(count, *tensor.shape)
    )
    return tensor.reshape(count * tensor.shape[1], *tensor.shape[2:])


def _fold_all(info: Any, axes: Any, tensors: Any, frame: Any, piece: str) -> tuple[Any, Any]:
    """Tensors and frame of the folded call; a batch axis of size 1 is first expanded to b."""
    mechanism, count = piece_named(piece), info.batch_size

    def inner(tensor: Tensor | None, axis: int | None) -> tuple[int, ...]:
        shape = list(tensor.shape) if tensor is not None else [1]
        if axis is not None:
            del shape[axis]
        return tuple(shape)

    patterns = list(mechanism.inputs.values())
    lead = [p.letters[:1] == "b" for p in patterns]
    b = max(inner(t, a)[0] for t, a, has in zip(tensors, axes[2], lead, strict=True) if has)

    def fold(tensor: Any, axis: Any, has_batch: bool) -> Any:
        if tensor is not None and has_batch and inner(tensor, axis)[0] == 1 and b > 1:
            at = 0 if axis is None else (1 if axis == 0 else 0)
            tensor = tensor.expand(*[b if i == at else n for i, n in enumerate(tensor.shape)])
        return _fold(count, tensor, axis, has_batch)

    folded = [fold(t, a, has) for t, a, has in zip(tensors, axes[2], lead, strict=True)]
    masks = [fold(t, a, True) for t, a in zip(frame, axes[3], strict=True)]
    return folded, masks


def _unfold(count: int, tensor: Tensor) -> Tensor:
    return tensor.reshape(count, tensor.shape[0] // count, *tensor.shape[1:])


@forward.register_vmap
def _(info: Any, in_dims: Any, piece: str, backend: str, tensors: Any, frame: Any) -> Any:
    if not _is_foldable(in_dims, piece):
        each = [forward(piece, backend, *call) for call in _calls(info, in_dims, tensors, frame)]
        return [torch.stack(same) for same in zip(*each, strict=True)], [0] * len(each[0])
    folded, masks = _fold_all(info, in_dims, tensors, frame, piece)
    outputs = forward(piece, backend, folded, masks)
    return [_unfold(info.batch_size, o) for o in outputs], [0] * len(outputs)


@inference.register_vmap
def _(info: Any, in_dims: Any, piece: str, backend: str, tensors: Any, frame: Any) -> Any:
    if not _is_foldable(in_dims, piece):
        calls = _calls(info, in_dims, tensors, frame)
        return torch.stack([inference(piece, backend, *call) for call in calls]), 0
    folded, masks = _fold_all(info, in_dims, tensors, frame, piece)
    return _unfold(info.batch_size, inference(piece, backend, folded, masks)), 0
