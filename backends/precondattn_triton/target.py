"""The GPU that kernels are built for: the one of the arrays, or another one to compile for.

A warning says where Triton assembles for Hopper with a version of ptxas whose results may be wrong.
On compute capability 9, ptxas may reuse the registers of an asynchronous product (wgmma) that still
reads them. CUDA 13.3 mended it (issue 9433 of Triton). Triton 3.6 and 3.7 bring an older ptxas, and
take another one from the variable TRITON_PTXAS_PATH.
"""

from __future__ import annotations

import warnings
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
MENDED = "13.3"
HOPPER = 9


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


def assembler() -> str:
    """The assembler that Triton uses here, with its version: "ptxas 12.8"."""
    from triton import knobs

    return f"ptxas {knobs.nvidia.ptxas.version}"


def warn_of_old_assembler(device: torch.device) -> None:
    """Warn once, if the GPU is a Hopper. The assembler is asked for its version on no other."""
    if _is_hopper(device):
        _warn()


@cache
def _is_hopper(device: torch.device) -> bool:
    """Whether the GPU is a Hopper; cached, because every call asks."""
    import torch

    # PyTorch reports a compute capability for AMD's GPUs too.
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == HOPPER


@cache
def _warn() -> None:
    import triton

    ptxas = triton.knobs.nvidia.ptxas
    if _numbers(ptxas.version) < _numbers(MENDED):
        warnings.warn(
            f"Triton's kernels may give wrong results on this GPU, because ptxas {ptxas.version} "
            f"({ptxas.path}) has a known fault there: set TRITON_PTXAS_PATH to the ptxas of CUDA "
            f"{MENDED} or newer, which is in the package nvidia-cuda-nvcc",
            RuntimeWarning,
            stacklevel=2,
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
