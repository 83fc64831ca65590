"""Weights that were saved before linear maps were modules of their own.

A weight of a linear map was then a parameter `inputs`, `q`, `weight` with the axes (x, h, d). It is
the matrix `q_proj`, `kernel` (x, h · d) now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from precondattn.arrays import Array, Tree
from precondattn.layers.flax.attention import Attention
from precondattn.layers.flax.block import BlockMLP
from precondattn.layers.maps import Stored

VALUE = "value"
"""The key under which an array of a variable may be saved."""

Path = tuple[Any, ...]


def from_earlier(state: Mapping[Tree, Tree], model: nnx.Module) -> dict[Tree, Tree]:
    """Arrays that an earlier version saved, by the names and with the shapes that a model has now.

    Parameters
    ----------
    state : nested dict of arrays
        Such as Orbax restores without a target, or `nnx.to_pure_dict` gives. It may contain states
        of the model's structure at any place, such as moments of an optimizer.
    model : nnx.Module
        The model that it belongs to, or one like it; `nnx.eval_shape` makes one without arrays.

    Returns
    -------
    dict
        For `nnx.update`, where it is the state of a model.

    Raises
    ------
    ValueError
        for a weight of a linear map that has not the shape that it had before.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from precondattn.layers.flax import Attention, from_earlier
    >>> layer = Attention(8, heads=2, rngs=nnx.Rngs(0))
    >>> after = from_earlier({"inputs": {"q": {"weight": jnp.zeros((8, 2, 4))}}}, layer)
    >>> after["q_proj"]["kernel"].shape
    (8, 8)
    """
    found = {path: (name, stored) for path, name, stored in _moved(model)}
    after: dict[Tree, Tree] = {}
    for path, array in _leaves(state, ()):
        before = next((path[i:] for i in range(len(path)) if path[i:] in found), None)
        if before is not None:
            name, stored = found[before]
            if tuple(array.shape) != stored.declared_shape:
                raise ValueError(
                    f"state: {'.'.join(map(str, path))} must have the shape "
                    f"{stored.declared_shape}, which it had before; found {tuple(array.shape)}"
                )
            path, array = (*path[: len(path) - len(before)], *name), stored(array)
        *places, last = path
        here = after
        for place in places:
            here = here.setdefault(place, {})
        here[last] = jnp.asarray(array)
    return after


def _moved(model: nnx.Module) -> Iterator[tuple[Path, Path, Stored]]:
    """Where each array was that has moved, where it is, and how it is stored."""
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Attention):
            for of_map in module.plan.maps:
                before, now = (*path, "inputs", of_map.entry), (*path, of_map.name)
                yield (*before, of_map.weight), (*now, "kernel"), Stored(of_map)
                if of_map.bias:
                    yield (*before, of_map.bias), (*now, "bias"), Stored(of_map, is_bias=True)
        elif isinstance(module, BlockMLP):
            for of_map in module.maps:
                yield (*path, of_map.weight), (*path, of_map.name, "kernel"), Stored(of_map)


def _leaves(state: Tree, path: Path) -> Iterator[tuple[Path, Array]]:
    if isinstance(state, Mapping) and {*state} == {VALUE}:
        yield path, state[VALUE]
    elif isinstance(state, Mapping):
        for key, value in state.items():
            number = int(key) if isinstance(key, str) and key.isdecimal() else key
            yield from _leaves(value, (*path, number))
    elif isinstance(state, list | tuple):
        for i, value in enumerate(state):
            yield from _leaves(value, (*path, i))
    else:
        yield path, state[...] if isinstance(state, nnx.Variable) else state
