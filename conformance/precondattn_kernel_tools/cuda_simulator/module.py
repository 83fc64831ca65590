"""Kernels of a CUDA source with the interface of `cupy.RawModule`."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

from precondattn_kernel_tools.cuda_simulator.arguments import LaunchArguments, parameters
from precondattn_kernel_tools.cuda_simulator.compilation import DEVICE, Built, build
from precondattn_kernel_tools.cuda_toolkit import include_folder

Order = int | Literal["reverse"] | None

_order: ContextVar[Order] = ContextVar("order", default=None)
_ORDERS: dict[Order, int] = {None: 0, "reverse": 1}
"""The runtime's numbers for orders; a random order has number 2."""
_one_at_a_time = threading.Lock()

STATIC_LIMIT, SHARED_LIMIT = 48 << 10, 227 << 10
"""The default and the largest size of shared memory in bytes."""
MOST_THREADS = 1024
GRID_LIMITS, BLOCK_LIMITS = (2**31 - 1, 65535, 65535), (1024, 1024, 64)


class KernelError(RuntimeError):
    """A fault of a kernel, with the line, the thread and the block. Arrays are left unchanged."""


class OutOfBoundsError(KernelError, IndexError):
    """A misaligned access, or one outside of an array, a shared variable or a local variable."""


class RaceError(KernelError):
    """Two threads access the same element in no defined order, and one of them writes."""


class UninitializedError(KernelError):
    """A thread reads shared memory that no thread of the block has written."""


class SynchronizationError(KernelError):
    """A barrier, a shuffle or a vote that some of its threads do not reach, or a deadlock."""


KINDS = (KernelError, OutOfBoundsError, RaceError, UninitializedError, SynchronizationError)
"""The error classes, indexed by the runtime's error number."""


@contextmanager
def checked(seed: Order = None) -> Iterator[None]:
    """Context in which launched kernels run in another order.

    With a seed, blocks and the threads of a block run in a random order; with "reverse", in reverse
    order; with None, in order.
    """
    if seed is not None and seed != "reverse" and (not isinstance(seed, int) or seed < 0):
        raise ValueError(f"seed has to be None, 'reverse' or an integer from 0 on, not {seed!r}")
    before = _order.set(seed)
    try:
        yield
    finally:
        _order.reset(before)


class SimulatedModule:
    """A CUDA source, compiled for the CPU.

    Parameters
    ----------
    source
        The code, or the path of its file.
    name_expressions
        Kernels that are templates, as for `cupy.RawModule`: "solve<__half, 64>". Kernels that are
        `extern "C"` need none.
    options
        "-DNAME=VALUE", "-Ifolder".

    Raises
    ------
    CompilationError
        if it does not compile, with the compiler's message.
    MissingToolError
        if g++ or CUDA's headers are not installed.
    """

    def __init__(
        self,
        source: str | Path,
        name_expressions: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> None:
        is_path = isinstance(source, Path)
        if not is_path and not isinstance(source, str):
            raise TypeError(f"source has to be text or a Path, not {type(source).__name__}")
        if isinstance(name_expressions, str) or isinstance(options, str):
            raise TypeError("name_expressions and options have to be sequences, not text")
        code = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
        name = str(source.resolve()) if isinstance(source, Path) else "kernel.cu"
        folder = source.resolve().parent if isinstance(source, Path) else None
        self._built = build(code, name, name_expressions, options, folder)
        self._library = ctypes.CDLL(str(self._built.path))

    def get_function(self, name: str) -> SimulatedFunction:
        """The kernel with a name or a name expression.

        Raises
        ------
        KeyError
            if there is none; the message lists the existing names.
        """
        if name not in self._built.names:
            raise KeyError(f"no kernel {name!r} among {', '.join(map(repr, self._built.names))}")
        return SimulatedFunction(self._library, self._built, name)


class SimulatedFunction:
    """One kernel: `function(grid, block, args, shared_mem=0)`."""

    def __init__(self, library: ctypes.CDLL, built: Built, name: str) -> None:
        number = built.names.index(name)
        signature = ctypes.create_string_buffer(4096)
        getattr(library, f"simulated_signature_{number}")(signature, ctypes.c_size_t(4096))
        self.name = name
        self._parameters = parameters(signature.value.decode())
        self._built, self._launch = built, library.simulated_launch
        self._kernel = getattr(library, f"simulated_call_{number}")
        self._dynamic_limit = STATIC_LIMIT

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """Bytes of dynamic shared memory that a launch may request: 48 KiB unless raised."""
        return self._dynamic_limit

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, count: int) -> None:
        if not 0 <= count <= SHARED_LIMIT:
            raise ValueError(
                f"max_dynamic_shared_size_bytes has to be at most {SHARED_LIMIT}, not {count}"
            )
        self._dynamic_limit = count

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[object], shared_mem: int = 0
    ) -> None:
        """Run every block, and write the arrays if none had an error.

        Raises
        ------
        KernelError
            for an error of a thread, of one of the kinds above.
        TypeError, ValueError
            for arguments with which the kernel can not be launched.
        """
        sizes = [*_size("grid", grid, GRID_LIMITS), *_size("block", block, BLOCK_LIMITS)]
        if (count := sizes[3] * sizes[4] * sizes[5]) > MOST_THREADS:
            raise ValueError(f"block has {count} threads, of {MOST_THREADS} at most")
        if not 0 <= shared_mem <= self._dynamic_limit:
            raise ValueError(
                f"shared_mem has to be at most {self._dynamic_limit} bytes, not {shared_mem}: "
                "max_dynamic_shared_size_bytes can be raised"
            )
        arguments = LaunchArguments(self.name, self._parameters, args)
        order = _order.get()
        message = ctypes.create_string_buffer(4096)
        with _one_at_a_time:
            has_failed = self._launch(
                self._kernel,
                arguments.pointers,
                arguments.arrays,
                len(arguments.arrays),
                arguments.places,
                arguments.offsets,
                len(arguments.offsets),
                (ctypes.c_uint * 6)(*sizes),
                ctypes.c_size_t(shared_mem),
                ctypes.c_size_t(max(STATIC_LIMIT, self._dynamic_limit)),
                _ORDERS.get(order, 2),
                ctypes.c_uint(order if isinstance(order, int) else 0),
                message,
                ctypes.c_size_t(len(message)),
            )
        if has_failed:
            kind, _, text = message.value.decode(errors="replace").partition("\n")
            raise KINDS[int(kind)](f"{self.name}: {self._with_lines(text)}")

    def _with_lines(self, text: str) -> str:
        path = self._built.path
        return re.sub(r"<code ([0-9a-f]+)>", lambda match: _line(path, int(match[1], 16)), text)


@functools.cache
def _line(path: Path, code: int) -> str:
    """The source line of the instruction before an address, which is the call."""
    command = ["addr2line", "-i", "-e", str(path), hex(code - 1)]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return f"code at {code:#x} (the line is known where addr2line is installed)"
    # Innermost first: an inlined function, then its callers.
    foreign = (str(DEVICE), str(include_folder()))
    frames = [line for line in lines.split("\n") if line and not line.startswith(foreign)]
    places = [
        f"line {number[2]} of {Path(number[1]).name}"
        for frame in frames
        if (number := re.match(r"(.*):(\d+)", frame))
    ]
    return ", called from ".join(places) or f"code at {code:#x}"


def _size(name: str, size: Sequence[int], limits: tuple[int, int, int]) -> list[int]:
    if isinstance(size, int) or not 1 <= len(size) <= 3:
        raise ValueError(f"{name} has to have one to three numbers, not {size!r}")
    whole = [int(count) for count in size] + [1] * (3 - len(size))
    if not all(1 <= count <= limit for count, limit in zip(whole, limits, strict=True)):
        raise ValueError(f"{name} has to be from 1 to {limits}, not {tuple(size)}")
    return whole
