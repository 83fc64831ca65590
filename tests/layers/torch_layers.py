"""Attention layers of PyTorch in float64, and their inputs."""

import torch

from precondattn.layers.torch import Attention
from tests.layers.layer_cases import layer

FEW = ("softmax", "path", "ssd", "gated_delta", "ccq(gla)", "differential(laser)")
"""Mechanisms for tests that are too slow for all."""


def made(expression, **options):
    return layer(Attention, expression, **{"dtype": torch.float64, **options})


def hidden(b, t, width=24, dtype=torch.float64):
    return torch.randn(b, t, width, dtype=dtype)
