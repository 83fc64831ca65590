"""A warning where Triton assembles for Hopper with a version of ptxas whose results may be wrong.

On compute capability 9, ptxas may reuse the registers of an asynchronous product (wgmma) that still
reads them. CUDA 13.3 mended it (issue 9433 of Triton). Triton 3.6 and 3.7 bring an older ptxas, and
take another one from the variable TRITON_PTXAS_PATH.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MENDED = "13.3"
HOPPER = 9


def name() -> str:
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
