"""Builds a shared library for this machine from a CUDA source, with a cache of earlier builds.

g++ preprocesses the source, the remaining CUDA keywords are rewritten, and g++ compiles the result
with every memory access instrumented. The runtime is compiled once and linked to each module.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from precondattn_kernel_tools.cuda_simulator.shared_declarations import (
    CompilationError,
    plain_kernels,
    translate,
)
from precondattn_kernel_tools.cuda_toolkit import MissingToolError, include_folder

HERE = Path(__file__).parent
DEVICE, RUNTIME = HERE / "device", HERE / "runtime"

COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-U_FORTIFY_SOURCE")
INSTRUMENTED = (
    *("-O1", "-g", "-w", "-fno-strict-aliasing"),
    # One rounding for each operation, so that sums differ from a GPU's only in the last bits.
    "-ffp-contract=off",
    "-fsanitize=thread",
    *("--param", "tsan-instrument-func-entry-exit=0", "--param", "tsan-distinguish-volatile=1"),
    "-fsanitize=bounds,alignment,integer-divide-by-zero,shift,signed-integer-overflow",
)
# With it uninitialised variables do not contain plausible numbers. Older compilers lack it.
PATTERN = "-ftrivial-auto-var-init=pattern"
SUPPORTED_OPTIONS = ("-D", "-I", "-U")
IGNORED_OPTIONS = ("-std=", "--std=", "--use_fast_math", "-use_fast_math", "--fmad=", "-fmad=")
"""NVRTC options that are accepted and ignored."""

# One line each, so that the compiler's messages show which name is unknown.
ENTRY = (
    'extern "C" __attribute__((visibility("default"))) '
    "void simulated_signature_{number}(char* to, unsigned long size) "
    "{{ ::simulated::signature(&{name}, to, size); }} "
    'extern "C" __attribute__((visibility("default"), no_sanitize("thread"))) '
    "void simulated_call_{number}(void** arguments) {{ ::simulated::call(&{name}, arguments); }}\n"
)


class Built(NamedTuple):
    """A library, and the names of its kernels by index."""

    path: Path
    names: list[str]


def build(
    code: str, source: str, expressions: Sequence[str], options: Sequence[str], folder: Path | None
) -> Built:
    """The library of a source, whose includes are searched in the folder first.

    Raises
    ------
    CompilationError
        with the compiler's message.
    MissingToolError
        if g++ or CUDA's headers are not installed.
    """
    arguments = [*_supported(options), *([f"-I{folder}"] if folder else [])]
    whole = f'#include "cuda_on_cpu.h"\n# 1 "{source}"\n{code}\n'
    text = _run(["-E", "-x", "c++", *COMMON, *_includes(), *arguments, "-"], whole)
    text = text.replace('"<stdin>"', f'"{source}"')  # It appears in debugging information.
    translated = translate(text, source)
    plain = plain_kernels(text, source)
    names = [*expressions, *(name for name in plain if name not in expressions)]
    if not names:
        raise CompilationError(
            f'{source} has no kernel: name_expressions is empty, and nothing is extern "C"'
        )
    entries = "".join(ENTRY.format(number=i, name=name) for i, name in enumerate(names))
    translated += f'\n# 1 "name_expressions"\n{entries}'
    runtime = _runtime()
    flags = [*COMMON, *INSTRUMENTED, *([PATTERN] if _supports_pattern() else [])]
    key = _key(translated, runtime.name, *flags)

    def make(path: Path) -> None:
        unit = path.with_suffix(".o")
        _run(["-c", "-x", "c++-cpp-output", *flags, "-o", str(unit), "-"], translated)
        # The sanitizers' libraries are not linked: the runtime defines the functions that are
        # called.
        _run(["-shared", "-Wl,--no-undefined", "-o", str(path), str(unit), str(runtime)])

    return Built(_cached(f"module-{key}.so", make), names)


def _supported(options: Sequence[str]) -> list[str]:
    supported = []
    for option in options:
        if option.startswith(SUPPORTED_OPTIONS):
            supported.append(option)
        elif not option.startswith(IGNORED_OPTIONS):
            raise ValueError(
                f"options has {option!r}: the simulator supports {', '.join(SUPPORTED_OPTIONS)}, "
                f"each joined to its argument, and ignores {', '.join(IGNORED_OPTIONS)}"
            )
    return supported


def _includes() -> list[str]:
    return [f"-I{DEVICE}", "-isystem", str(include_folder())]


@functools.cache
def _runtime() -> Path:
    sources = sorted(RUNTIME.glob("*.cpp"))
    files = (*sources, RUNTIME / "runtime.h", DEVICE / "interface.h")
    texts = [path.read_text(encoding="utf-8") for path in files]

    flags = [*COMMON, "-O2", *_includes(), "-r", "-nostdlib"]

    def make(path: Path) -> None:
        _run([*flags, "-o", str(path), *map(str, sources)])

    return _cached(f"runtime-{_key(*texts, *flags)}.o", make)


@functools.cache
def _compiler() -> tuple[str, str]:
    """The compiler's path and version."""
    path = shutil.which("g++")
    if path is None:
        raise MissingToolError("g++ is needed to simulate CUDA kernels, and is not found")
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    return path, done.stdout


@functools.cache
def _supports_pattern() -> bool:
    return int(_run(["-dumpversion"]).partition(".")[0]) >= 12


def _run(arguments: Sequence[str], text: str = "") -> str:
    done = subprocess.run(
        [_compiler()[0], *arguments], input=text, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CompilationError(re.sub(r"(?m)^\s+", "  ", done.stderr[:4000]))
    return done.stdout


def _key(*texts: str) -> str:
    digest = hashlib.sha256("\0".join((*texts, _compiler()[1])).encode())
    return digest.hexdigest()[:24]


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """The file with this name in the user's cache. Concurrent processes each get a complete one."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "precondattn" / "cuda_simulator"
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            fresh = Path(place) / name
            make(fresh)
            fresh.replace(path)
    return path
