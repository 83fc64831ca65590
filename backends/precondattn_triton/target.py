"""The GPU that kernels are for: that of the arrays, or another one that they are compiled for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_target = ""

PROCESSORS = {"sm_80": 108, "sm_90": 132}
"""Multiprocessors of an A100, and of an H100 SXM or an H200."""
FEW = 4
"""Multiprocessors where there is no GPU."""


@contextmanager
def compiling_for(target: str) -> Iterator[None]:
    """Kernels are for a GPU that this machine need not have, such as "sm_90" or "gfx942"."""
    global _target
    before, _target = _target, target
    try:
        yield
    finally:
        _target = before


def is_amd() -> bool:
    """Whether kernels are for AMD's GPUs: as this PyTorch is, unless inside `compiling_for`."""
    import torch

    return _target.startswith("gfx") if _target else torch.version.hip is not None


def device_name(like: Tensor | None) -> str:
    """The model of the GPU of a tensor; empty for every other device."""
    return _name(like.device) if like is not None and like.is_cuda else ""


def architecture(like: Tensor | None) -> str:
    """Such as "sm_90", of the GPU of a tensor; empty for AMD's GPUs and every other device."""
    if _target or is_amd():
        return _target if _target.startswith("sm_") else ""
    return _capability(like.device) if like is not None and like.is_cuda else ""


def processors(like: Tensor) -> int:
    """How many multiprocessors the GPU of a tensor has."""
    if _target:
        return PROCESSORS.get(_target, FEW)
    return _processors(like.device) if like.is_cuda else FEW


@cache
def _name(device: torch.device) -> str:
    """Cached: every launch asks."""
    import torch

    return str(torch.cuda.get_device_name(device))


@cache
def _capability(device: torch.device) -> str:
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def _processors(device: torch.device) -> int:
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def capability() -> str:
    """The compute capability of the current GPU, such as "9.0"; empty without one of NVIDIA's."""
    import torch

    if is_amd() or not torch.cuda.is_available():
        return ""
    return ".".join(map(str, torch.cuda.get_device_capability()))
