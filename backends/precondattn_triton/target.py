"""The GPU that kernels are built for: the one of the arrays, or another one to compile for."""

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
"""The number of multiprocessors to assume without a GPU."""


@contextmanager
def compiling_for(target: str) -> Iterator[None]:
    """A context that builds kernels for a GPU such as "sm_90" or "gfx942", which may be absent."""
    global _target
    before, _target = _target, target
    try:
        yield
    finally:
        _target = before


def is_amd() -> bool:
    """Whether kernels are for AMD's GPUs: as this PyTorch build, except inside `compiling_for`."""
    import torch

    return _target.startswith("gfx") if _target else torch.version.hip is not None


def architecture(like: Tensor | None) -> str:
    """The architecture of a tensor's GPU, such as "sm_90"; empty for all but NVIDIA's GPUs."""
    if _target or is_amd():
        return _target if _target.startswith("sm_") else ""
    return _capability(like.device) if like is not None and like.is_cuda else ""


def processors(like: Tensor) -> int:
    """The number of multiprocessors of a tensor's GPU."""
    if _target:
        return PROCESSORS.get(_target, FEW)
    return _processors(like.device) if like.is_cuda else FEW


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
