"""Fills Triton's cache of compiled kernels without a GPU, for use in another folder or machine.

    with filled(folder, "sm_90") as kernels:
        attention.vjp(**inputs_on_the_meta_device)

Each launch compiles what Triton would compile for it on that GPU, but does not run it. Triton finds
a kernel by a key: the text of the kernel and of what it calls, the types, constants and
divisibility of its arguments, its options, the GPU's architecture, the assembler's version, and the
files of Triton itself. So Triton, Python and the assembler (`TRITON_PTXAS_PATH`) must be the same
as on the other machine. The folders of kernels, Triton and the assembler do not matter. But Triton
writes the cache's own path into the cache; `moved` changes that.

The cache also contains the C code that Triton 3.6 compiles on the host to call kernels
(`triton_host_code`).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from precondattn_kernel_tools.foreign import CompiledKernel, KernelFunction, Launchable, Target

GROUP = "__grp__"
"""The name prefix of files in which Triton lists the files of a kernel by their paths."""


class StubDriver:
    """A driver with the answers about an absent GPU that Triton needs in order to compile."""

    def __init__(self, target: str) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)

    def get_current_target(self) -> Target:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass
class LaunchedKernels:
    """The launched kernels: compiled, found in the cache, or left."""

    compiled: dict[str, str] = field(default_factory=dict)
    """Names of newly compiled kernels, by cache folder."""
    found: dict[str, str] = field(default_factory=dict)
    """Names of kernels that were in the cache already, by cache folder."""
    left: Counter[str] = field(default_factory=Counter)
    """Numbers of launches that were not compiled because time had run out, by name."""


@contextmanager
def filled(
    folder: Path,
    target: str,
    until: float = float("inf"),
    host_code: Callable[[CompiledKernel], None] | None = None,
) -> Iterator[LaunchedKernels]:
    """Context in which launches are compiled for a target such as "sm_90" into a folder, not run.

    After `until`, on the clock `time.monotonic`, launches are only counted. `host_code` is called
    with every kernel.
    """
    import triton
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    run, active = JITFunction.run, driver._active
    kernels = LaunchedKernels()

    def compile_only(
        self: Launchable, *args: object, grid: object, warmup: bool = False, **named: object
    ) -> CompiledKernel | None:
        if time.monotonic() >= until:
            kernels.left[self.__name__] += 1
            return None
        kernel = run(self, *args, grid=grid, warmup=True, **named)
        if host_code is not None:
            host_code(kernel)
        return kernel

    def note(
        *, src: KernelFunction, metadata_group: dict[str, str], cache_hit: bool, **_: object
    ) -> None:
        of = kernels.found if cache_hit else kernels.compiled
        of[Path(next(iter(metadata_group.values()))).parent.name] = src.name

    with triton.knobs.compilation.scope(), triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        triton.knobs.compilation.store_binary_only = True
        triton.knobs.compilation.listener = note
        JITFunction.run = compile_only
        driver.set_active(StubDriver(target))
        try:
            yield kernels
        finally:
            JITFunction.run = run
            driver._active = active


def build_of_triton() -> str:
    """A hash of the files of the installed Triton. Only the same Triton finds the kernels."""
    from triton.runtime.cache import triton_key

    return hashlib.sha256(triton_key().encode()).hexdigest()[:12]


def moved(folder: Path, to: Path) -> int:
    """Change the paths in a cache so that its kernels are found at `to`; returns their number."""
    groups = sorted(folder.glob(f"*/{GROUP}*"))
    for path in groups:
        files = json.loads(path.read_text(encoding="utf-8"))["child_paths"]
        there = {name: str(to / path.parent.name / name) for name in files}
        path.write_text(json.dumps({"child_paths": there}), encoding="utf-8")
    return len(groups)
