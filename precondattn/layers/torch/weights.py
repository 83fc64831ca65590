"""Weights of a Flax module as those of the PyTorch module of the same name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from precondattn.arrays import Tree


def to_torch(state: Mapping[Tree, Tree]) -> dict[str, torch.Tensor]:
    """A nested dict of arrays, such as `nnx.state(module, nnx.Param)`, as a `state_dict`.

    Names are the same in both, but for linear maps: `q_proj`, `kernel` (x, y) of an `nnx.Linear` is
    `"q_proj.weight"` (y, x) of an `nn.Linear`.

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
    if array.dtype.name == "bfloat16":  # PyTorch does not read NumPy's.
        return torch.tensor(array.astype(np.float32)).bfloat16()
    return torch.tensor(array)
