"""A process without a GPU in which the Triton backend runs on the absent device.

Kernels are not compiled: in their place an object counts the launches. PyTorch's own attention has
no kernel there, and is replaced by an allocation of its result.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from precondattn_gpu import warm_calls

if TYPE_CHECKING:
    import torch


Foreign = Any
"""An object of Triton or of PyTorch's autograd."""


class Launches:
    """How many kernels were launched."""

    def __init__(self) -> None:
        self.count = 0
        self.bytes: Counter[str] | None = None
        """The bytes of the arrays of all launches, each once a launch, by kernel; None if not
        counted."""


class CountedKernel:
    """What counts the launches of a kernel, in place of the compiled one."""

    function, packed_metadata = 0, ()

    def __init__(self, name: str, launches: Launches) -> None:
        self.name, self.launches = name, launches

    def launch_metadata(self, *_: object) -> None:
        """Nothing: no profiler looks at the launch."""

    def run(self, *arguments: object) -> None:
        launches = self.launches
        launches.count += 1
        if launches.bytes is not None:
            launches.bytes[self.name] += _bytes_of(arguments)


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
    """Context in which calls on the absent device run as on a GPU; counts their launches."""
    import torch
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from precondattn_kernel_tools.absent_device import install

    launches, device = Launches(), install()

    def compiled(self: Foreign, key: object, _: object, index: int, *__: object) -> CountedKernel:
        kernel = CountedKernel(self.__name__, launches)
        self.device_caches[index][0][key] = kernel
        return kernel

    driver.set_active(DriverOfAbsentGpu())
    functional = torch.nn.functional
    with (
        patch.object(JITFunction, "_do_compile", compiled),
        patch.object(functional, "scaled_dot_product_attention", attention),
        warm_calls.as_on_a_gpu(),
    ):
        yield device, launches


@contextmanager
def captured() -> Iterator[None]:
    """Context in which calls behave as while a CUDA graph captures them."""
    from precondattn import arrays
    from precondattn.execution import preparation
    from precondattn_kernel_tools.absent_device import NAME

    def is_captured(tensor: torch.Tensor) -> bool:
        return str(tensor.device.type) == NAME

    with (
        patch.object(arrays, "is_captured", is_captured),
        patch.object(preparation, "is_captured", is_captured),
    ):
        yield


def _bytes_of(arguments: tuple[object, ...]) -> int:
    import torch

    sizes: dict[int, int] = {}
    for a in arguments:
        if isinstance(a, torch.Tensor):
            # All arrays of the absent device have the same address.
            storage = a.untyped_storage()._cdata
            sizes[storage] = max(sizes.get(storage, 0), a.numel() * a.element_size())
    return sum(sizes.values())


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
