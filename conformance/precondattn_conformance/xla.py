"""XLA options for a process that calls each function once: compilation is several times as fast.

They turn off optimisations of machine code on a CPU, with which float32 results may differ in the
last bit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from precondattn_conformance.cores import by_default
from precondattn_conformance.machine_names import version

FLAGS = "XLA_FLAGS"
"""Environment variable that JAX reads when it is first used."""


def quick_flags() -> str:
    """The options for the installed version of JAX."""
    flags = ["--xla_backend_optimization_level=0"]
    if (version("jaxlib") or "").startswith("0.10."):  # Later versions end the process at this.
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)


def compiling_quickly() -> AbstractContextManager[None]:
    """Context in which started processes use the options, unless `FLAGS` is set."""
    return by_default(FLAGS, quick_flags())
