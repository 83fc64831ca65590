"""Records the launches of a package without a GPU: its launching code runs on meta tensors.

    with recorded() as launches:
        runner.forward(inputs_on_the_meta_device, frame)
    variants = [launch.variant("lucid d128") for launch in launches]

So the variants that are compiled ahead of time (`triton_compiler.py`) are exactly those that are
shipped: the same types, constants and numbers of warps, and integers specialised as at run time (1
is a constant, and multiples of 16 are known to be divisible).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from precondattn_kernel_tools.foreign import Argument, KernelFunction
from precondattn_kernel_tools.triton_compiler import Variant

TYPES = {
    "torch.float16": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float32": "fp32",
    "torch.float64": "fp64",
    "torch.int8": "i8",
    "torch.uint8": "u8",
    "torch.bool": "i1",
    "torch.int32": "i32",
    "torch.int64": "i64",
}
"""Triton's names of dtypes."""

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "waves_per_eu")

Grid = tuple[int, ...] | Callable[[dict[str, Argument]], tuple[int, ...]]


class TritonLaunch(NamedTuple):
    """One launch of a kernel."""

    function: KernelFunction
    grid: tuple[int, ...]
    arguments: dict[str, Argument]
    options: dict[str, int]

    def variant(self, name: str) -> Variant:
        """The variant that Triton would compile, named by `name` and the kernel's name."""
        signature: dict[str, str] = {}
        constants: dict[str, object] = {}
        divisible = []
        for parameter in self.function.params:
            value = self.arguments[parameter.name]
            if parameter.is_constexpr or value is None or value is True or value is False:
                constants[parameter.name] = value
            elif isinstance(value, int):
                if value == 1:
                    constants[parameter.name] = 1
                    continue
                signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0:
                    divisible.append(parameter.name)
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            else:
                signature[parameter.name] = "*" + TYPES[str(value.dtype)]
        return Variant(
            f"{name} {self.function.__name__}",
            self.function,
            signature,
            constants,
            self.options,
            divisible=tuple(divisible),
        )


@contextmanager
def recorded() -> Iterator[list[TritonLaunch]]:
    """Context in which launches are appended to the list and not run."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    launches: list[TritonLaunch] = []

    def record(
        self: KernelFunction, *args: Argument, grid: Grid, warmup: bool = False, **named: Argument
    ) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        arguments = dict(zip(self.arg_names, args, strict=False)) | named
        size = grid(arguments) if callable(grid) else grid
        launches.append(TritonLaunch(self, tuple(map(int, size)), arguments, options))

    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run
