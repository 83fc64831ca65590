"""A process without a GPU in which Triton launches kernels on the absent device.

Kernels are not compiled: in their place an object counts the launches. PyTorch's own attention has
no kernel there, and is replaced by an allocation of its result.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from precondattn_kernel_tools.absent_device.install import install

if TYPE_CHECKING:
    import torch


Foreign = Any
"""An object of Triton or of PyTorch's autograd."""


class Launches:
    """How many kernels were launched."""

    count = 0


class CountedKernel:
    """What counts the launches of a kernel, in place of the compiled one."""

    function, packed_metadata = 0, ()

    def __init__(self, launches: Launches) -> None:
        self.launches = launches

    def launch_metadata(self, *_: object) -> None:
        """Nothing: no profiler looks at the launch."""

    def run(self, *_: object) -> None:
        self.launches.count += 1


class DriverOfAbsentGpu:
    """Triton's driver for one GPU, of compute capability 9.0."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@contextmanager
def absent_gpu() -> Iterator[tuple[torch.device, Launches]]:
    """Context in which Triton's launches on the absent device are counted."""
    import torch
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    launches, device = Launches(), install()

    def compiled(self: Foreign, key: object, _: object, index: int, *__: object) -> CountedKernel:
        kernel = CountedKernel(launches)
        self.device_caches[index][0][key] = kernel
        return kernel

    driver.set_active(DriverOfAbsentGpu())
    functional = torch.nn.functional
    with (
        patch.object(JITFunction, "_do_compile", compiled),
        patch.object(functional, "scaled_dot_product_attention", attention),
    ):
        yield device, launches


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: object) -> torch.Tensor:
    """A result of the shape of softmax attention, which has a gradient if the inputs have."""
    out: torch.Tensor = _attention_function().apply(q, k, v)
    return out


@functools.cache
def _attention_function() -> Foreign:
    import torch

    class Attention(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Foreign, *inputs: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*inputs)
            return torch.empty_like(inputs[0])

        @staticmethod
        def backward(ctx: Foreign, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(map(torch.empty_like, ctx.saved_tensors))

    return Attention
