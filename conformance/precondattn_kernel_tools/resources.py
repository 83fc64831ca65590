"""The resources of a compiled kernel, and whether they exceed those of a multiprocessor."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from precondattn_kernel_tools import Foreign

SHARED_LIMITS = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_120": 99,
    "gfx90a": 64,
    "gfx942": 64,
    "gfx950": 160,
}
"""KiB of shared memory that a block may have, by target."""


@dataclass
class Resources:
    """The resources of a compiled variant."""

    name: str
    target: str
    seconds: float = 0.0
    """Seconds of compilation."""
    registers: int = 0
    spilt_bytes: int = 0
    shared_bytes: int = 0
    failures: list[str] = field(default_factory=list)
    key: str = ""
    """The key from code, configuration, target and compiler (`ahead_of_time.py`)."""


def judge(resources: Resources, spill_limit: int) -> None:
    """Add a failure for each resource that the variant exceeds."""
    limit = SHARED_LIMITS[resources.target] << 10
    if resources.spilt_bytes > spill_limit:
        resources.failures.append(f"spills {resources.spilt_bytes} bytes (at most {spill_limit})")
    if resources.shared_bytes > limit:
        resources.failures.append(
            f"needs {resources.shared_bytes} bytes of shared memory, of {limit}"
        )


def measured(
    name: str, target: str, spill_limit: int, compile_it: Callable[[], Foreign]
) -> Resources:
    """The resources of a kernel that Triton compiles; a compiler error becomes a failure."""
    resources = Resources(name, target)
    start = time.perf_counter()
    try:
        compiled = compile_it()
        resources.seconds = round(time.perf_counter() - start, 2)
        resources.registers, resources.spilt_bytes = of_a_thread(compiled.asm)
    except Exception as error:  # A compiler error is a result, not a fault.
        resources.failures.append(f"{type(error).__name__}: {error}")
        return resources
    resources.shared_bytes = compiled.metadata.shared
    judge(resources, spill_limit)
    return resources


def of_a_thread(assembly: Mapping[str, str]) -> tuple[int, int]:
    """The registers and spilled bytes of a thread."""
    if "amdgcn" in assembly:
        text = assembly["amdgcn"]
        spilt = 4 * _number(r"\.vgpr_spill_count:\s+(\d+)", text)
        return _number(r"\.vgpr_count:\s+(\d+)", text), spilt
    log = _assembler_log(assembly["ptx"])
    return _number(r"Used (\d+) registers", log), _number(r"(\d+) bytes spill stores", log)


def _assembler_log(ptx: str) -> str:
    """The log of the assembler that Triton uses."""
    from triton.backends.nvidia.compiler import get_ptxas

    architecture = re.search(r"\.target (sm_(\d+)\w*)", ptx)
    if architecture is None:
        raise ValueError("the assembly names no architecture")
    program = get_ptxas(int(architecture[2])).path
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [program, "-v", "-arch", architecture[1], "-o", os.devnull, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the assembler's log has no {pattern!r}")
    return int(match[1])


def line(resources: Resources) -> str:
    """The line of a variant in the terminal."""
    r = resources
    numbers = (
        f"{r.target:6s}  {r.registers:3d} registers  {r.spilt_bytes:5d} spilt  "
        f"{r.shared_bytes:6d} shared  {r.seconds:6.2f} s  {r.name}"
    )
    failures = (textwrap.indent(failure, "    ") for failure in r.failures)
    return "\n".join([numbers, *failures])
