"""Compiles the device once, and registers it with PyTorch."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NAME = "absent"
SOURCE = Path(__file__).with_name("device.cpp")
FLAGS = ("-O1", "-std=c++20", "-shared", "-fPIC", "-w")


@functools.cache
def install() -> torch.device:
    """Register the device in this process.

    Raises
    ------
    RuntimeError
        if g++ is not installed, or does not compile the device.
    """
    import torch

    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.ops.load_library(str(_library()))
    return torch.device(NAME, 0)


def _module() -> ModuleType:
    """What PyTorch asks of `torch.absent`."""
    module = ModuleType(f"torch.{NAME}")
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "_is_in_bad_fork": False,
        "_lazy_init": None,
    }
    for name, answer in answers.items():
        setattr(module, name, lambda *_, answer=answer: answer)
    return module


def _library() -> Path:
    """The compiled device, in the user's cache folder."""
    import torch
    from torch.utils import cpp_extension

    compiler = shutil.which("g++")
    if compiler is None:
        raise RuntimeError("g++ is needed to compile the absent device, and is not found")
    parts = (SOURCE.read_text(encoding="utf-8"), torch.__version__, *FLAGS)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = home / "precondattn" / "absent_device" / f"{key}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        fresh = Path(folder) / path.name
        includes = [f"-I{each}" for each in cpp_extension.include_paths()]
        libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
        command = [compiler, *FLAGS, *includes, "-o", str(fresh), str(SOURCE), *libraries]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the absent device does not compile:\n{done.stderr[:4000]}")
        fresh.replace(path)
    return path
