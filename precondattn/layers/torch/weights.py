"""The conversion of weights from Flax modules to the PyTorch modules of the same name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from precondattn.arrays import Tree


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
