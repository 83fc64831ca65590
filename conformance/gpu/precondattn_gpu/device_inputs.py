"""Inputs of a mechanism, made on the device: clustered keys, and numbers in their declared ranges.

On a CPU, the suite's inputs of a long sequence take seconds. These follow the same rules
(`precondattn_conformance.inputs`, kind "clustered"), with other random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

import precondattn as pa
from precondattn.algebra.declaration import Pattern
from precondattn.arrays import Array
from precondattn_conformance.inputs import CallLayout
from precondattn_conformance.libraries import TorchLibrary

CLUSTERS, SPREAD_OF_KEYS, SPREAD_OF_QUERIES = 3, 0.1, 0.3


class OnDevice(TorchLibrary):
    """PyTorch, with tensors on the device in the place of NumPy arrays."""

    def array(self, values: Array, dtype: str | None = None) -> Array:
        if not isinstance(values, torch.Tensor):
            return super().array(values, dtype)
        return values.to(getattr(torch, dtype)) if dtype and values.is_floating_point() else values


def make(
    mechanism: pa.Mechanism, layout: CallLayout, dtype: str, device: str
) -> dict[str, torch.Tensor]:
    """The inputs by name, rounded to the dtype."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    inputs = mechanism.inputs
    x = {name: _in_range(p, normal(*p.shape(layout.sizes))) for name, p in inputs.items()}
    if "k" in x:
        x["k"] = _clustered(x["k"], normal)
        if "q" in x:
            heads = x["q"].shape[2] // x["k"].shape[2]
            last = x["k"].shape[1] - 1
            chosen = torch.randint(last + 1, x["q"].shape[1:2], generator=generator, device=device)
            near = x["k"][:, chosen].repeat_interleave(heads, 2)
            x["q"] = near + SPREAD_OF_QUERIES * x["q"]
    x = {name: _unit(a) if inputs[name].unit else a for name, a in x.items()}
    return {name: array.to(getattr(torch, dtype)) for name, array in x.items()}


def _clustered(keys: torch.Tensor, normal: Callable[..., torch.Tensor]) -> torch.Tensor:
    """A few directions, with a little noise."""
    b, s, *rest = keys.shape
    centres = normal(b, CLUSTERS, *rest)
    cluster = torch.arange(s, device=keys.device) * 7919 % CLUSTERS
    return centres[:, cluster] + SPREAD_OF_KEYS * keys


def _unit(rows: torch.Tensor) -> torch.Tensor:
    length = rows.norm(dim=-1, keepdim=True)
    return rows / torch.where(length > 0, length, 1.0)


def _in_range(pattern: Pattern, numbers: torch.Tensor) -> torch.Tensor:
    """Normal numbers, mapped into the declared range."""
    low = -math.inf if pattern.low is None else pattern.low
    high = math.inf if pattern.high is None else pattern.high
    if math.isinf(low) and math.isinf(high):
        return numbers
    if math.isfinite(low) and math.isfinite(high):
        return low + (high - low) * torch.special.ndtr(numbers)
    distance = torch.exp(0.7 * numbers)
    return low + distance if math.isfinite(low) else high - distance
