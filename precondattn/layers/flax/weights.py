"""The conversion of weights from PyTorch modules to the Flax modules of the same name."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp

from precondattn.arrays import Array, Tree


def to_flax(state_dict: Mapping[str, Array]) -> dict[Tree, Tree]:
    """The state for `nnx.update`, a nested dict of JAX arrays, from a `state_dict` of PyTorch.

    The names are the same in both, except for linear maps: `"q_proj.weight"` (y, x) of an
    `nn.Linear` becomes `q_proj`, `kernel` (x, y) of an `nnx.Linear`.

    Examples
    --------
    >>> import torch
    >>> from precondattn.layers.flax import to_flax
    >>> to_flax({"blocks.0.attention.q_proj.weight": torch.ones(1, 2)})
    {'blocks': {0: {'attention': {'q_proj': {'kernel': Array([[1.],
           [1.]], dtype=float32)}}}}}
    """
    nested: dict[Tree, Tree] = {}
    for name, tensor in state_dict.items():
        *path, last = (int(key) if key.isdecimal() else key for key in name.split("."))
        branch = nested
        for key in path:
            branch = branch.setdefault(key, {})
        host = tensor.detach().cpu()
        if last == "weight" and path and str(path[-1]).endswith("_proj"):
            last, host = "kernel", host.T
        is_bfloat16 = str(host.dtype) == "torch.bfloat16"  # NumPy has no such type.
        array = jnp.asarray((host.float() if is_bfloat16 else host).numpy())
        branch[last] = array.astype(jnp.bfloat16) if is_bfloat16 else array
    return nested
