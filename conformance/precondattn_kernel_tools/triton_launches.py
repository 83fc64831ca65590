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

from precondattn_kernel_tools import Foreign
from precondattn_kernel_tools.triton_compiler import ArgumentType, Place, Variant

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

Grid = tuple[int, ...] | Callable[[dict[str, Foreign]], tuple[int, ...]]


class TritonLaunch(NamedTuple):
    """One launch of a kernel."""

    function: Foreign
    grid: tuple[int, ...]
    arguments: dict[str, Foreign]
    options: dict[str, int]

    @property
    def values(self) -> dict[str, Foreign]:
        """The arguments by name, and the entries of named tuples by the names of their fields."""
        tuples = (value for value in self.arguments.values() if hasattr(value, "_fields"))
        return {n: entry for t in tuples for n, entry in t._asdict().items()} | self.arguments

    def variant(self, name: str) -> Variant:
        """The variant that Triton would compile, named by `name` and the kernel's name."""
        signature: dict[str, ArgumentType] = {}
        constants: dict[str | Place, object] = {}
        divisible: list[str | Place] = []

        def typed(value: Foreign, place: str | Place, is_constant: bool) -> ArgumentType:
            if isinstance(value, tuple) and not is_constant:
                base = self.function.arg_names.index(place) if isinstance(place, str) else place
                base = (base,) if isinstance(base, int) else base
                types = [typed(entry, (*base, i), False) for i, entry in enumerate(value)]
                return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
            if is_constant or value is None or isinstance(value, bool) or _is_one(value):
                constants[place] = value
                return "constexpr"
            if isinstance(value, int):
                if value % 16 == 0:
                    divisible.append(place)
                return "i32" if -(2**31) <= value < 2**31 else "i64"
            return "fp32" if isinstance(value, float) else "*" + TYPES[str(value.dtype)]

        for parameter in self.function.params:
            value = self.arguments[parameter.name]
            kind = typed(value, parameter.name, parameter.is_constexpr)
            if kind != "constexpr":
                signature[parameter.name] = kind
        return Variant(
            f"{name} {self.function.__name__}",
            self.function,
            signature,
            constants,
            self.options,
            divisible=tuple(divisible),
        )


def _is_one(value: Foreign) -> bool:
    return isinstance(value, int) and value == 1


@contextmanager
def recorded() -> Iterator[list[TritonLaunch]]:
    """Context in which launches are appended to the list and not run."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    launches: list[TritonLaunch] = []

    def record(
        self: Foreign, *args: Foreign, grid: Grid, warmup: bool = False, **named: Foreign
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
