"""The conversion of weights that were saved before linear maps were separate modules.

The weight of a linear map was then a parameter `inputs`, `q`, `weight` with the axes (x, h, d). Now
it is the matrix `q_proj`, `kernel` (x, h · d).
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
    """Arrays saved by an earlier version, with the present names and shapes of a model.

    Parameters
    ----------
    state : nested dict of arrays
        The saved state, as Orbax restores it without a target, or as `nnx.to_pure_dict` returns it.
        It may contain several states with the model's structure, such as moments of an optimizer.
    model : nnx.Module
        The model that the state belongs to, or one with the same structure; `nnx.eval_shape` makes
        one without arrays.

    Returns
    -------
    dict
        The converted state; use `nnx.update` if it is the state of a model.

    Raises
    ------
    ValueError
        for the weight of a linear map whose shape is not the earlier one.

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
    """The old path, the new path and the new storage of each array that has moved."""
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
