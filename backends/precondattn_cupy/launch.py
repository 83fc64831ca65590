"""Launches of kernels, by name and arguments.

    launch("unit_rows", "unit_rows<float>", (rows,), 128, (o, y, 96, 64, 1e-6))

Arrays are passed as pointers, and None as the null pointer; Python integers are passed as `int`,
floats as `float`, and NumPy scalars with their own type. CuPy compiles a kernel at its first launch
on a device, caches it on disk, and raises the driver's errors. On a machine without a GPU, kernels
run in the simulator of the conformance suite, on NumPy arrays.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from precondattn.arrays import Array
from precondattn.kernel_backend.precise import is_precise

FOLDER = Path(__file__).with_name("cuda")
INCLUDE = re.compile(r'^#include "([\w.]+)"\n', re.MULTILINE)


@functools.cache
def source(name: str) -> str:
    """The text of `name`.cu, with each header at its first include only.

    CuPy caches compiled code by its source text. An included header is not part of that text, so a
    changed header would not be compiled.
    """
    return _written_out(f"{name}.cu", set())


def _written_out(file: str, included: set[str]) -> str:
    if file in included:
        return ""
    included.add(file)
    text = (FOLDER / file).read_text(encoding="utf-8").replace("#pragma once\n", "")
    return INCLUDE.sub(lambda result: _written_out(result[1], included), text)


CPP_TYPES = {
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "float64": "double",
}
STATIC_LIMIT = 48 << 10
"""Bytes of dynamic shared memory that a kernel may use without an attribute."""
GRID_LIMITS = (2**31 - 1, 65535, 65535)
SIMULATE = "PRECONDATTN_CUPY_SIMULATE"
"""The environment variable that, if 1, runs kernels in the simulator, on NumPy arrays."""


class CudaLaunch(NamedTuple):
    """The record of a launch."""

    file: str
    kernel: str
    """The name expression, such as "unit_rows<float>"."""
    grid: tuple[int, ...]
    threads: int
    shared_bytes: int


_recorded: ContextVar[list[CudaLaunch] | None] = ContextVar("recorded", default=None)


def is_simulated() -> bool:
    """Whether kernels are simulated on the CPU or only recorded: no device is needed."""
    return _recorded.get() is not None or os.environ.get(SIMULATE, "0") not in ("", "0")


@contextmanager
def recorded() -> Iterator[list[CudaLaunch]]:
    """A context in which launches are recorded and not executed."""
    result: list[CudaLaunch] = []
    before = _recorded.set(result)
    try:
        yield result
    finally:
        _recorded.reset(before)


Argument = Any
"""An argument of a kernel: an array, a number, or None."""

Kernel = Any
"""A function of a compiled or a simulated module."""


def cpp_type(array: Array) -> str:
    """The C++ type of an array's elements."""
    return CPP_TYPES[str(array.dtype)]


def launch(
    file: str,
    kernel: str,
    grid: Sequence[int],
    threads: int,
    arguments: Sequence[Argument],
    shared_bytes: int = 0,
) -> None:
    """Run a kernel of `file`.cu on the current device and stream.

    Raises
    ------
    ValueError
        if the grid exceeds a GPU's limits, or a number its parameter's range.
    MemoryError
        if the device has less shared memory per block than requested.
    """
    if any(
        not 0 < size <= limit for size, limit in zip(grid, GRID_LIMITS[: len(grid)], strict=True)
    ):
        raise ValueError(f"{kernel}: a grid has from 1 to {GRID_LIMITS} blocks, not {tuple(grid)}")
    simulated = is_simulated()
    values = tuple(_value(kernel, argument, simulated) for argument in arguments)
    launches = _recorded.get()
    if launches is not None:
        launches.append(CudaLaunch(file, kernel, tuple(grid), threads, shared_bytes))
        return
    if simulated:
        function = _simulated(file, kernel, is_precise())
    else:
        device = _device()
        if shared_bytes > (limit := _shared_limit(device)):
            raise MemoryError(
                f"{kernel}: needs {shared_bytes} bytes of shared memory for a block; "
                f"device {device} has {limit}"
            )
        function = _compiled(file, kernel, device, is_precise())
    if shared_bytes > max(STATIC_LIMIT, function.max_dynamic_shared_size_bytes):
        function.max_dynamic_shared_size_bytes = shared_bytes
    function(tuple(grid), (threads,), values, shared_mem=shared_bytes)


def _value(kernel: str, argument: Argument, simulated: bool) -> Argument:
    if argument is None:
        return None if simulated else np.uint64(0)
    if isinstance(argument, np.generic):
        return argument
    if isinstance(argument, (bool, int)):
        if not -(2**31) <= argument < 2**31:
            raise ValueError(f"{kernel}: integers must fit 32 bits; found {argument}")
        return np.int32(argument)
    return np.float32(argument) if isinstance(argument, float) else argument


@functools.cache
def _compiled(file: str, kernel: str, device: int, precise: bool) -> Kernel:
    """A compiled kernel. A module has one kernel, so that only called kernels are compiled."""
    import cupy

    module = cupy.RawModule(
        code=source(file),
        options=("-std=c++17", *_defined(precise)),
        name_expressions=(kernel,),
        backend="nvrtc",
    )
    return module.get_function(kernel)


@functools.cache
def _simulated(file: str, kernel: str, precise: bool) -> Kernel:
    from precondattn_kernel_tools.cuda_simulator import SimulatedModule

    module = SimulatedModule(FOLDER / f"{file}.cu", [kernel], _defined(precise))
    return module.get_function(kernel)


def _defined(precise: bool) -> tuple[str, ...]:
    """The compiler's option for precise kernels."""
    return ("-DPRECONDATTN_PRECISE",) if precise else ()


def _device() -> int:
    import cupy

    return int(cupy.cuda.Device().id)


@functools.cache
def _shared_limit(device: int) -> int:
    import cupy

    attributes = cupy.cuda.Device(device).attributes
    return int(attributes["MaxSharedMemoryPerBlockOptin"])
