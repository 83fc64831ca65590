"""Inputs of a mechanism that become parameters: a temperature, a scale per dimension, a sink.

They become parameters of the model's attention module, by the published recipes. Their initial
values change nothing: a temperature of 1, a scale of 1. A sink starts with the logit 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple, cast

from torch import Tensor, nn

from precondattn.algebra.mechanism import Mechanism
from precondattn.layers.maps import Weight
from precondattn.layers.meaning import meanings
from precondattn.layers.recipe import Recipe, RecipeTokens
from precondattn.layers.recipes import Learned, Positive, recipes_for
from precondattn.layers.torch.module import fill, register
from precondattn.limits import KEPT

NAME = "mechanism_inputs"
"""The attribute of an attention module with these parameters, by input."""
GIVEN = ("q", "k", "v")


class Input(NamedTuple):
    """One input, its recipe, and the name of its parameter."""

    name: str
    recipe: Recipe
    weight: str


@lru_cache(maxsize=KEPT)
def learned_inputs(mechanism: Mechanism, has_sink: bool) -> tuple[Input, ...]:
    """The inputs of a mechanism that Transformers does not pass to an attention function."""
    found = []
    for name, (call, formal) in meanings(mechanism.program).items():
        if name in GIVEN or (name == "sink" and has_sink):
            continue
        recipe = recipes_for(call.leaf).get(formal)
        if not isinstance(recipe, (Learned, Positive)):
            raise TypeError(
                f"{mechanism} has the input {name} ({mechanism.inputs[name]}), which depends on "
                f"the tokens; the attention of a model has only queries, keys and values"
            )
        (weight,) = recipe.parameters()
        found.append(Input(name, recipe, weight))
    return tuple(found)


def add_parameters(
    module: nn.Module, mechanism: Mechanism, inputs: tuple[Input, ...], sizes: Mapping[str, int]
) -> None:
    """Register the parameters of these inputs; `sizes` has the sizes of the letters h and d."""
    if not inputs:
        return
    like = next(module.parameters())
    holder = nn.Module()
    for name, recipe, weight_name in inputs:
        shape = tuple(axis.size(sizes) for axis in mechanism.inputs[name].axes)
        weight = Weight(shape, recipe.parameters()[weight_name].start, ())
        register(holder, name, weight, like.device, like.dtype)
        fill(holder.get_parameter(name), weight)
    setattr(module, NAME, holder)


def values(module: nn.Module, inputs: tuple[Input, ...]) -> dict[str, Tensor]:
    """The values of these inputs, computed from their parameters."""
    if not inputs:
        return {}
    holder = getattr(module, NAME)
    return {
        name: cast(Tensor, recipe.make(cast(RecipeTokens, None), {weight: getattr(holder, name)}))
        for name, recipe, weight in inputs
    }
