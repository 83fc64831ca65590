"""XLA options for a process that calls each function once: compilation is several times as fast.

They turn off optimisations of machine code on a CPU, with which float32 results may differ in the
last bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

FLAGS = "XLA_FLAGS"
"""Environment variable that JAX reads when it is first used."""


def quick_flags() -> str:
    """The options for the installed version of JAX."""
    flags = ["--xla_backend_optimization_level=0"]
    try:
        is_known = version("jaxlib").startswith("0.10.")
    except PackageNotFoundError:
        is_known = False
    if is_known:  # Later versions end the process at this option.
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)


@contextmanager
def compiling_quickly() -> Iterator[None]:
    """Context in which started processes use the options, unless `FLAGS` is set."""
    if FLAGS in os.environ:
        yield
        return
    os.environ[FLAGS] = quick_flags()
    try:
        yield
    finally:
        del os.environ[FLAGS]
