"""Compiling CUDA kernels for GPUs that are not there: do they compile, and do they fit?

    python -m precondattn_kernel_tools.cuda_compiler MODULE --target sm_90 --save FILE

`MODULE.variants(target)` gives the variants that a package ships for a target. Each is compiled to
machine code by NVRTC, as CuPy does at run time, and what it needs of a multiprocessor is read from
the assembler's log. A variant that spills more, or takes more shared memory than there is, is a
failure.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from precondattn_kernel_tools import nvrtc
from precondattn_kernel_tools.compiler_arguments import parsed
from precondattn_kernel_tools.cuda_toolkit import MissingToolError, include_folder
from precondattn_kernel_tools.resources import SHARED_LIMITS, Resources, judge, line

TARGETS = tuple(target for target in SHARED_LIMITS if target.startswith("sm_"))

REGISTERS = 65536
"""Of a multiprocessor, and so of a block."""


class Variant(NamedTuple):
    """One way in which a kernel is shipped."""

    name: str
    """Its own: no other variant of the module has it."""
    source: str | Path
    """The code, or the path of its file."""
    name_expression: str
    """As `cupy.RawModule` takes it, "solve<__half, 64>"; a name alone is `extern "C"`."""
    options: tuple[str, ...] = ()
    """NVRTC's, such as "-DTILE=64". CUDA's headers and the file's folder are found without."""
    dynamic_shared_bytes: int = 0
    """What a launch asks for, beside what the kernel declares."""
    spill_limit: int = 0
    """Bytes that a thread may spill."""
    threads: int = 0
    """Of a block, if registers for so many are to be held to what there are."""


def compile_variant(variant: Variant, target: str) -> Resources:
    """For a target such as "sm_90"; what the compiler refuses is a failure.

    Raises
    ------
    ValueError
        when the target is not one of `TARGETS`.
    MissingToolError
        when NVRTC or CUDA's headers are not installed.
    """
    if target not in TARGETS:
        raise ValueError(f"target has to be one of {', '.join(TARGETS)}, not {target!r}")
    found = Resources(variant.name, target)
    folders = [include_folder()]
    code, name = str(variant.source), "kernel.cu"
    start = time.perf_counter()
    try:
        if isinstance(variant.source, Path):
            code, name = variant.source.read_text(), variant.source.name
            folders.insert(0, variant.source.resolve().parent)
        options = (*variant.options, *(f"-I{folder}" for folder in folders))
        compiled = nvrtc.compile_kernel(code, name, variant.name_expression, target, options)
    except (nvrtc.NvrtcError, OSError) as error:
        found.failures.append(f"{type(error).__name__}: {error}")
        return found
    found.seconds = round(time.perf_counter() - start, 2)
    found.registers, found.spilt_bytes = compiled.registers, compiled.spilt_bytes
    found.shared_bytes = compiled.shared_bytes + variant.dynamic_shared_bytes
    judge(found, variant.spill_limit)
    # A warp gets registers in eights for each thread; a launch that needs more fails.
    needed = -(-found.registers // 8) * 8 * (-(-variant.threads // 32) * 32)
    if needed > REGISTERS:
        found.failures.append(
            f"needs {needed} registers for {variant.threads} threads, of {REGISTERS}: "
            "__launch_bounds__ holds the compiler to fewer"
        )
    return found


def variants_of(module: str, target: str) -> dict[str, Variant]:
    """By name, as they are shipped for a target.

    Raises
    ------
    ValueError
        when two have the same.
    """
    variants = list(importlib.import_module(module).variants(target))
    counts = Counter(variant.name for variant in variants)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"{module} has more than one variant of the name {', '.join(twice)}")
    return {variant.name: variant for variant in variants}


def compile_all(asked: Sequence[tuple[Variant, str]], jobs: int) -> Iterator[Resources]:
    """For each (variant, target), in that order, in as many processes as there are jobs."""
    with _processes(min(jobs, len(asked))) as pool:
        running = [pool.submit(compile_variant, *each) for each in asked]
        for (variant, target), future in zip(asked, running, strict=True):
            try:
                yield future.result()
            except BrokenProcessPool:  # This one, or one beside it, took the process down.
                yield _compile_alone(variant, target)


def _compile_alone(variant: Variant, target: str) -> Resources:
    with _processes(1) as pool:
        try:
            return pool.submit(compile_variant, variant, target).result()
        except BrokenProcessPool:
            return Resources(variant.name, target, failures=["the compiler's process died"])


def _processes(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


def report(found: Sequence[Resources]) -> dict[str, object]:
    """For a file: what was compiled with, and each variant's resources."""
    return {
        "nvrtc": nvrtc.version(),
        "python": platform.python_version(),
        "variants": [asdict(resources) for resources in found],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print a line for each variant, and return 1 when one of them fails."""
    parser, given = parsed("CUDA", TARGETS, "sm_80, sm_90", arguments)
    try:
        asked = [
            (variant, target)
            for target in given.target
            for variant in variants_of(given.module, target).values()
            if given.match in variant.name
        ]
        if not asked:
            parser.error(f"{given.module} has no variant with {given.match!r} in its name")
        if given.list:
            print("\n".join(dict.fromkeys(variant.name for variant, _ in asked)))
            return 0
        nvrtc.version()
        include_folder()
    except (ValueError, MissingToolError) as error:
        parser.error(str(error))
    found = []
    for resources in compile_all(asked, given.jobs):
        found.append(resources)
        print(line(resources), flush=True)
    if given.save:
        given.save.write_text(json.dumps(report(found), indent=1) + "\n")
    return int(any(resources.failures for resources in found))


if __name__ == "__main__":
    sys.exit(main())
