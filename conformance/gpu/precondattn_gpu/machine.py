"""The machine on which results were measured: its device and package versions."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from precondattn_conformance.machine_names import version
from precondattn_gpu.options import RunOptions

if TYPE_CHECKING:
    from precondattn.json_types import JsonObject

PACKAGES = (
    *("precondattn", "numpy", "torch", "triton", "jax", "jaxlib", "cupy-cuda13x"),
    *("fla-core", "flash-linear-attention", "transformers"),
)
DECISIVE = ("numpy", "torch", "triton", "jax", "cupy-cuda13x")
"""Packages whose versions have to agree: results of different versions are not mixed."""

SOURCES = ("precondattn", "precondattn_triton", "precondattn_pallas", "precondattn_cupy",
           "precondattn_torch", "precondattn_jax", "precondattn_portable")  # fmt: skip


def describe(options: RunOptions) -> JsonObject:
    """The device's name and the package versions."""
    return {
        "device": device_name(options),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := version(name))},
    }


def difference(earlier: JsonObject, now: JsonObject) -> str:
    """The difference between the earlier machine and this one that forbids mixing results."""
    pairs = [("device", earlier.get("device"), now["device"])]
    pairs += [
        (name, earlier.get("versions", {}).get(name), now["versions"].get(name))
        for name in DECISIVE
    ]
    return ", ".join(f"{name} {old}, here {new}" for name, old, new in pairs if old != new)


def require_same(file: str, earlier: JsonObject, now: JsonObject) -> None:
    """Raise a ValueError if a file's earlier results can not be mixed with new ones."""
    if earlier and (found := difference(earlier, now)):
        raise ValueError(
            f"the earlier results of {file} are of other versions ({found}): give another folder"
        )


def device_name(options: RunOptions) -> str:
    """The model of the GPU.

    Raises
    ------
    RuntimeError
        if PyTorch finds no GPU.
    """
    if options.is_cpu:
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no GPU here; `--device cpu` runs what a CPU can run")
    return str(torch.cuda.get_device_name())


def folder_name(device: str) -> str:
    """A device's name as the name of a folder or file: nvidia_h200."""
    return "_".join("".join(c if c.isalnum() else " " for c in device.lower()).split())


@cache
def code() -> str:
    """A hash of the sources of the core and the backends, saved with each result."""
    digest = hashlib.sha256()
    for name in SOURCES:
        spec = find_spec(name)
        folder = Path(spec.origin).parent if spec and spec.origin else None
        for path in sorted(folder.rglob("*")) if folder else ():
            if path.suffix in (".py", ".cu", ".cuh", ".h"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
