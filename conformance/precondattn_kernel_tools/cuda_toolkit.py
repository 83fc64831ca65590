"""Finds the parts of CUDA that do not require a GPU: its headers and NVRTC.

They are installed as wheels by the extra `kernels`, or belong to a toolkit in `CUDA_PATH`.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

INSTALL = "pip install 'precondattn[kernels]', or set CUDA_PATH to a CUDA toolkit"


class MissingToolError(RuntimeError):
    """Raised if a tool is not installed. The message names it and says how to install it."""


@functools.cache
def include_folder() -> Path:
    """The folder of `cuda_fp16.h`.

    Raises
    ------
    MissingToolError
    """
    for folder in _folders("include"):
        if (folder / "cuda_fp16.h").is_file():
            return folder
    raise MissingToolError(f"CUDA's headers are needed, and cuda_fp16.h is not found: {INSTALL}")


@functools.cache
def nvrtc_library() -> Path:
    """The newest `libnvrtc.so` in the first folder that contains one.

    Raises
    ------
    MissingToolError
    """
    for name in ("lib", "lib64"):
        for folder in _folders(name):
            libraries = sorted(folder.glob("libnvrtc.so*"))
            if libraries:
                return libraries[-1]
    raise MissingToolError(f"NVRTC is needed, and libnvrtc.so is not found: {INSTALL}")


def _folders(name: str) -> Iterator[Path]:
    # The wheels share the namespace `nvidia`: CUDA 12 has a folder for each, CUDA 13 one for all.
    wheels = importlib.util.find_spec("nvidia")
    for place in (wheels.submodule_search_locations or ()) if wheels else ():
        yield from sorted(Path(place).glob(f"*/{name}"))
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if variable in os.environ:
            yield Path(os.environ[variable]) / name
    yield Path("/usr/local/cuda") / name
