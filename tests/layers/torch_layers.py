"""Attention layers of PyTorch in float64, and their inputs."""

import math
from functools import partial

import pytest
import torch

from precondattn.layers.torch import Attention, to_torch
from tests.layers.layer_cases import layer

FEW = ("softmax", "path", "ssd", "gated_delta", "ccq(gla)", "differential(laser)")
"""Mechanisms for tests that are too slow for all."""


def made(expression, **options):
    return layer(Attention, expression, **{"dtype": torch.float64, **options})


def hidden(b, t, width=24, dtype=torch.float64):
    return torch.randn(b, t, width, dtype=dtype)


def in_flax(model, *sizes, **options):
    """The decoder of Flax with the weights of another one, whose names it has."""
    nnx = pytest.importorskip("flax.nnx")
    from precondattn.layers import flax

    same = flax.Decoder(*sizes, **options, rngs=nnx.Rngs(0))
    nnx.update(same, flax.to_flax(model.state_dict()))
    assert set(to_torch(nnx.state(same, nnx.Param))) == set(model.state_dict())
    return same


def by_declared_axes(attn):
    """All weights of a layer with the names and axes that recipes declare.

    W of q is (x, h, d), and that of the output (h, e, x).
    """
    weights = {name: dict(module.named_parameters()) for name, module in attn.inputs.items()}
    for of_map in attn.plan.maps:
        module, sizes = attn.get_submodule(of_map.name), [of_map.outer[i] for i in of_map.order]
        back = [of_map.order.index(i) for i in range(len(sizes))]
        inner = math.prod(of_map.inner)
        matrix = module.weight.T.reshape(inner, *sizes).permute(0, *(1 + i for i in back))
        own = weights.setdefault(of_map.entry, {})
        own[of_map.weight] = matrix.reshape(*of_map.inner, *of_map.outer)
        if of_map.bias:
            own[of_map.bias] = module.bias.reshape(sizes).permute(back)
    return {name: weights.get(name, {}) for name, _ in attn.plan.weights}


def from_declared_axes(attn, arrays):
    """The `state_dict` of a layer from arrays with the names and axes that recipes declare."""
    state = {f"inputs.{name}": torch.tensor(array.copy()) for name, array in arrays.items()}
    for of_map in attn.plan.maps:
        for own, declared in (("weight", of_map.weight), ("bias", of_map.bias)):
            array = state.pop(f"inputs.{of_map.entry}.{declared}", None)
            if array is not None:
                as_stored = partial(of_map.stored, is_bias=own == "bias", outer_first=True)
                state[f"{of_map.name}.{own}"] = as_stored(array).contiguous()
    return state
