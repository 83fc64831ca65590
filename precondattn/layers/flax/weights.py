"""Weights of a PyTorch module as those of the Flax module of the same name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp


def to_flax(state_dict: Mapping[str, Any]) -> dict[Any, Any]:
    """A `state_dict` of PyTorch as a nested dict of JAX's arrays, for `nnx.update`.

    Names and shapes are the same in both: `"inputs.q.weight"` is `inputs`, `q`, `weight`.

    Examples
    --------
    >>> import torch
    >>> from precondattn.layers.flax import to_flax
    >>> to_flax({"blocks.0.inputs.q.weight": torch.ones(2)})
    {'blocks': {0: {'inputs': {'q': {'weight': Array([1., 1.], dtype=float32)}}}}}
    """
    nested: dict[Any, Any] = {}
    for name, tensor in state_dict.items():
        *path, last = (int(key) if key.isdecimal() else key for key in name.split("."))
        here = nested
        for key in path:
            here = here.setdefault(key, {})
        host = tensor.detach().cpu()
        is_bfloat16 = str(host.dtype) == "torch.bfloat16"  # NumPy has no such type.
        array = jnp.asarray((host.float() if is_bfloat16 else host).numpy())
        here[last] = array.astype(jnp.bfloat16) if is_bfloat16 else array
    return nested
