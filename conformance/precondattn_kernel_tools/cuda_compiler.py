"""Compiles CUDA kernels without a GPU: do they compile, and do they fit?

    python -m precondattn_kernel_tools.cuda_compiler MODULE --target sm_90 --save FILE

`MODULE.variants(target)` yields the variants that a package ships for a target. NVRTC compiles each
to machine code, as in CuPy at run time, and its resources are read from the assembler's log. A
variant that spills more than its limit, or needs more shared memory than a block may have, is a
failure.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from precondattn_kernel_tools import nvrtc
from precondattn_kernel_tools.ahead_of_time import (
    CompileTask,
    key_of,
    parsed,
    print_names,
    run,
    selected,
)
from precondattn_kernel_tools.cuda_toolkit import MissingToolError, include_folder
from precondattn_kernel_tools.resources import SHARED_LIMITS, Resources, judge

TARGETS = tuple(target for target in SHARED_LIMITS if target.startswith("sm_"))

REGISTERS = 65536
"""The number of registers of a multiprocessor, and so the largest number for a block."""


class Variant(NamedTuple):
    """One variant in which a kernel is shipped."""

    name: str
    """A name that is unique in the module."""
    source: str | Path
    """The code, or the path of its file."""
    name_expression: str
    """A name expression as for `cupy.RawModule`, "solve<__half, 64>", or an `extern "C"` name."""
    options: tuple[str, ...] = ()
    """Options of NVRTC, such as "-DTILE=64"; not needed for CUDA's headers and the file's
    folder."""
    dynamic_shared_bytes: int = 0
    """Bytes that a launch requests in addition to the kernel's static shared memory."""
    spill_limit: int = 0
    """The number of bytes that a thread may spill."""
    threads: int = 0
    """The threads of a block, whose registers must then not exceed a multiprocessor's."""


def compile_variant(variant: Variant, target: str) -> Resources:
    """Compile a variant for a target such as "sm_90"; a compiler error becomes a failure.

    Raises
    ------
    ValueError
        if the target is not one of `TARGETS`.
    MissingToolError
        if NVRTC or CUDA's headers are not installed.
    """
    if target not in TARGETS:
        raise ValueError(f"target has to be one of {', '.join(TARGETS)}, not {target!r}")
    resources = Resources(variant.name, target)
    start = time.perf_counter()
    try:
        kernel = compiled(variant, target)
    except (nvrtc.NvrtcError, OSError) as error:
        resources.failures.append(f"{type(error).__name__}: {error}")
        return resources
    resources.seconds = round(time.perf_counter() - start, 2)
    resources.registers, resources.spilt_bytes = kernel.registers, kernel.spilt_bytes
    resources.shared_bytes = kernel.shared_bytes + variant.dynamic_shared_bytes
    judge(resources, variant.spill_limit)
    # Registers are allocated in units of eight for each thread of a warp.
    needed = -(-resources.registers // 8) * 8 * (-(-variant.threads // 32) * 32)
    if needed > REGISTERS:
        resources.failures.append(
            f"needs {needed} registers for {variant.threads} threads, of {REGISTERS}: "
            "__launch_bounds__ holds the compiler to fewer"
        )
    return resources


def compiled(variant: Variant, target: str) -> nvrtc.Compiled:
    """NVRTC's compiled kernel.

    Raises
    ------
    NvrtcError, OSError
        if the kernel does not compile, or its file can not be read.
    """
    folders = [include_folder()]
    code, name = str(variant.source), "kernel.cu"
    if isinstance(variant.source, Path):
        code, name = variant.source.read_text(encoding="utf-8"), variant.source.name
        folders.insert(0, variant.source.resolve().parent)
    options = (*variant.options, *(f"-I{folder}" for folder in folders))
    return nvrtc.compile_kernel(code, name, variant.name_expression, target, options)


def key_of_variant(variant: Variant, target: str) -> str:
    """The key of a variant (`ahead_of_time.py`)."""
    code = variant.source
    # Included files are not read here, so a key of the file would not reflect their changes.
    text = without_comments(code) if isinstance(code, str) and '#include "' not in code else ""
    if not text:
        return ""
    sizes = (variant.dynamic_shared_bytes, variant.spill_limit, variant.threads)
    return key_of(text, variant.name_expression, variant.options, sizes, target, nvrtc.version())


def without_comments(code: str) -> str:
    """C++ without comments and blank lines, and without spaces at the ends of lines."""

    def kept(match: re.Match[str]) -> str:
        text = match[0]
        return " " if text.startswith("/") else text

    # A comment, or a string or character in which slashes do not start a comment.
    pattern = r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'"
    lines = re.sub(pattern, kept, code, flags=re.DOTALL).splitlines()
    return "\n".join(line.strip() for line in lines if line.strip())


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print a line for each variant, and return 1 if one of them fails."""
    parser, options = parsed("CUDA", TARGETS, "sm_80, sm_90", arguments)
    pairs = selected(parser, options)
    if options.list:
        print_names(pairs)
        return 0
    try:
        version = nvrtc.version()
        include_folder()
    except MissingToolError as error:
        parser.error(str(error))
    tasks = [
        CompileTask(variant.name, target, key_of_variant(variant, target), (variant, target))
        for variant, target in pairs
    ]
    return run(options, compile_variant, tasks, {"nvrtc": version})


if __name__ == "__main__":
    sys.exit(main())
