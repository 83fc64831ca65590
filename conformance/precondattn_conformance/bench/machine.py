"""The machine: its description, and the rates that it reaches in a GEMM and in a copy.

A share of a data sheet's rate says little about a shared or throttled machine. So FLOP/s and
bytes/s are shares of the rates of one large matrix product and one large copy in the same run.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from typing import NamedTuple

import numpy as np

from precondattn.arrays import Array, device_of, namespace, writes_in_place
from precondattn.json_types import JsonObject
from precondattn_conformance.bench.computation import finished
from precondattn_conformance.bench.paired import timed
from precondattn_conformance.libraries import Library, named
from precondattn_conformance.machine_names import processor, version

GEMM_SIZE = {"cpu": 1536, "gpu": 8192}
COPY_BYTES = {"cpu": 2**27, "gpu": 2**30}
"""Large enough that the launch takes a negligible part of the time."""
ROUNDS = 7
PACKAGES = (
    *("precondattn", "numpy", "torch", "jax", "cupy-cuda13x"),
    *("transformers", "flash-linear-attention", "fla-core"),
)


class Rates(NamedTuple):
    """The rates of a library on a device in a dtype."""

    library: str
    device: str
    dtype: str
    flops_per_second: float
    """The rate of a product of two square matrices."""
    bytes_per_second: float
    """The rate of a copy, counting bytes read and bytes written."""


@cache
def rates(name: str, device: str | None, dtype: str, *, quick: bool = False) -> Rates:
    """The best of a few rounds each."""
    library = named(name, device)
    kind = "cpu" if device in (None, "cpu") and name != "cupy" else "gpu"
    size, count = (128, 2**16) if quick else (GEMM_SIZE[kind], COPY_BYTES[kind])
    with library.precision(dtype):
        values = np.random.default_rng(0).normal(size=(size, size))
        matrix = library.array(values, dtype)
        vector = library.array(np.zeros(count // 4, dtype=np.float32), "float32")
        target = namespace(vector).zeros_like(vector)

        def copy() -> Array:
            if not writes_in_place(vector):
                return namespace(vector).asarray(vector, copy=True)
            target[...] = vector
            return target

        product = 2.0 * size**3 / _best(library, lambda: matrix @ matrix)
        return Rates(
            name, device_name(library, matrix), dtype, product, 2.0 * count / _best(library, copy)
        )


def _best(library: Library, call: Callable[[], Array]) -> float:
    """The shortest of a few rounds, in seconds."""
    finished(library, {"": call()})
    return min(timed(lambda: finished(library, {"": call()})) for _ in range(ROUNDS))


def device_name(library: Library, array: Array) -> str:
    """The kind of device, such as `cpu`; for a GPU also its model."""
    kind = device_of(array)
    if kind == "cuda" and library.name == "torch":
        import torch

        return f"cuda ({torch.cuda.get_device_name(array.device)})"
    return kind


def describe() -> JsonObject:
    """The machine and the versions of packages, without names of hosts or users.

    The threads are those of PyTorch if it is loaded, else the number of cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch = sys.modules.get("torch")
    versions = {name: version(name) for name in PACKAGES}
    return {
        "processor": processor(),
        "cores": cores or 1,
        "threads": int(torch.get_num_threads()) if torch is not None else cores or 1,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: number for name, number in versions.items() if number},
    }


def now() -> str:
    """The date and time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
