"""Environment variables of started processes: numbers of threads, and options of XLA.

NumPy's and PyTorch's threads wait for each other by spinning. With twice as many threads as cores,
small arrays take several times as long, so each process gets its share of the cores. A process that
calls each function once compiles several times as fast without optimisations of machine code; on a
CPU, float32 results may then differ in the last bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import PackageNotFoundError, version

THREADS, FLAGS = "OMP_NUM_THREADS", "XLA_FLAGS"
"""Variables that libraries read once, when they are imported or first used."""


def shared_by(processes: int) -> AbstractContextManager[None]:
    """Context in which started processes use their share of the cores, unless `THREADS` is set."""
    return _unless_set(THREADS, str(max((os.cpu_count() or 1) // max(processes, 1), 1)))


def compiling_quickly() -> AbstractContextManager[None]:
    """Context in which started processes compile quickly, unless `FLAGS` is set."""
    return _unless_set(FLAGS, quick_flags())


def quick_flags() -> str:
    """The options of XLA for the installed version of JAX."""
    flags = "--xla_backend_optimization_level=0"
    try:
        is_known = version("jaxlib").startswith("0.10.")
    except PackageNotFoundError:
        is_known = False
    # Later versions end the process at the second option.
    return f"{flags} --xla_cpu_use_fusion_emitters=false" if is_known else flags


@contextmanager
def _unless_set(name: str, setting: str) -> Iterator[None]:
    if name in os.environ:
        yield
        return
    os.environ[name] = setting
    try:
        yield
    finally:
        del os.environ[name]
