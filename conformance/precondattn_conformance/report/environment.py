"""The environment of a run: versions, device, driver, and the revision of the adopter's own code.

It does not contain the name of a host, a user or a folder.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from precondattn_conformance.machine_names import processor, version

if TYPE_CHECKING:
    from precondattn.json_types import JsonObject


PACKAGES = (
    "precondattn",
    "numpy",
    "array-api-compat",
    "array-api-strict",
    "torch",
    "jax",
    "jaxlib",
    "triton",
    "cupy",
    "cupy-cuda12x",
    "cupy-cuda13x",
)
SETTINGS = (
    "PRECONDATTN_BLOCKS",
    "TRITON_INTERPRET",
    "JAX_PLATFORMS",
    "JAX_ENABLE_X64",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUPY_TF32",
)
"""Environment variables that affect what is computed, or on which device."""

DRIVERS = {"nvidia": "/sys/module/nvidia/version", "amdgpu": "/sys/module/amdgpu/version"}


def describe() -> JsonObject:
    """The environment as known before the first case runs."""
    versions = {name: found for name in PACKAGES if (found := version(name))}
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor(),
        "drivers": {name: text for name, at in DRIVERS.items() if (text := _line(Path(at)))},
        "versions": versions,
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "revision": revision(Path.cwd()),
    }


def accelerators() -> dict[str, str]:
    """The model of each library's accelerator, if the library has used it; starts no library."""
    names: dict[str, str] = {}
    for library, query in (("torch", _of_torch), ("jax", _of_jax), ("cupy", _of_cupy)):
        try:
            name = query()
        except Exception:  # If a device's name is unavailable, the record is still written.
            continue
        if name:
            names[library] = name
    return names


def _of_torch() -> str:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    return str(torch.cuda.get_device_name())


def _of_jax() -> str:
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is None or not bridge.backends_are_initialized():
        return ""
    device = sys.modules["jax"].devices()[0]
    return "" if device.platform == "cpu" else str(device.device_kind)


def _of_cupy() -> str:
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return ""
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"]
    return str(name.decode())


def backends(names: tuple[str, ...]) -> list[dict[str, str]]:
    """The backends under test, each with the package that installed it, if any."""
    installed = {entry.name: entry for entry in metadata.entry_points(group="precondattn.backends")}
    described = []
    for name in names:
        entry_of_backend = {"name": name}
        entry = installed.get(name)
        if entry is not None and entry.dist is not None:
            entry_of_backend |= {"package": entry.dist.name, "version": entry.dist.version}
        described.append(entry_of_backend)
    return described


def revision(folder: Path) -> JsonObject | None:
    """The commit of a folder, and whether tracked files differ from it; None outside of git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=5, check=True
        )
        return done.stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return {"commit": commit, "modified": bool(git("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
