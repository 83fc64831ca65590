"""Command-line options that the tasks depend on."""

from __future__ import annotations

import os
from dataclasses import dataclass

CUDA, CPU = "cuda", "cpu"


@dataclass(frozen=True)
class RunOptions:
    """Options of the command line."""

    device: str = CUDA
    """The device. On `cpu`, kernels are interpreted or simulated, and sizes are small."""
    match: str = ""
    """A part of a name; only tasks whose name contains it run."""
    cores: int = os.cpu_count() or 1
    ptxas: str = ""
    """The path of the assembler for Triton; empty for the one in the Triton package."""

    @property
    def is_cpu(self) -> bool:
        return self.device == CPU


INTERPRETED = {
    "triton": {"TRITON_INTERPRET": "1"},
    "pallas": {"JAX_PLATFORMS": "cpu"},
    "cupy": {"PRECONDATTN_CUPY_SIMULATE": "1"},
}
"""Environment variables that make a backend run its kernels on a CPU."""

PTXAS = "TRITON_PTXAS_PATH"
"""Environment variable that names the assembler for Triton."""

LIBRARY = {"triton": "torch", "pallas": "jax", "cupy": "cupy"}
"""The array library of each backend on a GPU."""

HELPER = {"triton": "torch", "pallas": "jax", "cupy": "portable"}
"""The backend that computes the pieces for which there is no kernel."""

BACKENDS = tuple(LIBRARY)


def library_of(backend: str, options: RunOptions) -> str:
    """The array library of a backend; on a CPU, CUDA kernels are simulated on NumPy arrays."""
    return "numpy" if backend == "cupy" and options.is_cpu else LIBRARY[backend]


def variables(backend: str, options: RunOptions) -> dict[str, str]:
    """Environment variables for a process that runs a backend."""
    if options.is_cpu:
        return INTERPRETED[backend]
    return {PTXAS: options.ptxas} if options.ptxas and backend == "triton" else {}
