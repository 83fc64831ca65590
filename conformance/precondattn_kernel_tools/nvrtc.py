"""NVRTC, NVIDIA's run-time compiler: translates CUDA C++ to machine code, with the assembler's log.

It requires neither a GPU nor a driver. CuPy compiles with the same library.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

from precondattn_kernel_tools.cuda_toolkit import nvrtc_library

STATIC_LIMIT = 48 << 10
"""Bytes of shared memory that a kernel may declare statically; more has to be dynamic."""


class NvrtcError(RuntimeError):
    """A compiler error with its message."""


class Compiled(NamedTuple):
    """One kernel compiled for one target."""

    registers: int
    spilt_bytes: int
    shared_bytes: int
    """Bytes of static shared memory; a launch requests dynamic shared memory in addition."""


def compile_kernel(
    code: str, name: str, name_expression: str, target: str, options: Sequence[str] = ()
) -> Compiled:
    """Compile the kernel with a name expression, "solve<__half, 64>", or an `extern "C"` name.

    Raises
    ------
    NvrtcError
        with the compiler's messages.
    MissingToolError
        if NVRTC is not installed.
    """
    library = _library()
    program = ctypes.c_void_p()
    _require(
        library.nvrtcCreateProgram(
            ctypes.byref(program), code.encode(), name.encode(), 0, None, None
        )
    )
    try:
        _require(library.nvrtcAddNameExpression(program, name_expression.encode()))
        flags = [f"-arch={target}", "-std=c++17", "--ptxas-options=-v", *options]
        encoded = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        status = library.nvrtcCompileProgram(program, len(flags), encoded)
        log = _log(program)
        if status:
            raise NvrtcError(_with_too_large(log).strip() or _reason(status))
        lowered = ctypes.c_char_p()
        _require(
            library.nvrtcGetLoweredName(program, name_expression.encode(), ctypes.byref(lowered))
        )
        return _of(lowered.value.decode() if lowered.value else "", log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def version() -> str:
    """NVRTC's version, such as "13.0"."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _require(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return f"{major.value}.{minor.value}"


@functools.cache
def _library() -> ctypes.CDLL:
    path = nvrtc_library()
    # NVRTC loads this library by its name, which succeeds once it is loaded.
    for part in sorted(path.parent.glob("libnvrtc-builtins.so*")):
        ctypes.CDLL(str(part))
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _reason(status: int) -> str:
    return str(_library().nvrtcGetErrorString(status).decode())


def _require(status: int) -> None:
    if status:
        raise NvrtcError(_reason(status))


def _log(program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _require(_library().nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _require(_library().nvrtcGetProgramLog(program, text))
    return text.value.decode(errors="replace")


def _with_too_large(log: str) -> str:
    """The log, with a message about too much shared memory, which some versions omit."""
    sizes = [int(size) for size in re.findall(r"(\d+) bytes smem", log)]
    if "error" not in log and max(sizes, default=0) > STATIC_LIMIT:
        return f"{max(sizes)} bytes of shared memory are declared, of {STATIC_LIMIT}\n{log}"
    return log


def _of(lowered: str, log: str) -> Compiled:
    """The resources of one kernel; the log may contain those of other kernels too."""
    for part in re.split(r"Compiling entry function ", log)[1:]:
        if not part.startswith(f"'{lowered}'"):
            continue
        registers = re.search(r"Used (\d+) registers", part)
        spilt = re.search(r"(\d+) bytes spill stores", part)
        if registers and spilt:
            shared = re.search(r"(\d+) bytes smem", part)
            static = int(shared[1]) if shared else 0
            return Compiled(int(registers[1]), int(spilt[1]), static)
    raise NvrtcError(f"the assembler's log has nothing on {lowered!r}:\n{log}")
