"""Sharing of the CPU's cores among processes: each process starts its share of threads.

NumPy's and PyTorch's threads wait for each other by spinning. With twice as many threads as cores,
small arrays take several times as long.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

THREADS = "OMP_NUM_THREADS"
"""Environment variable with the number of threads, which libraries read once when imported."""


@contextmanager
def shared_by(processes: int) -> Iterator[None]:
    """Context in which started processes use their share of the cores, unless `THREADS` is set."""
    if THREADS in os.environ:
        yield
        return
    os.environ[THREADS] = str(max((os.cpu_count() or 1) // max(processes, 1), 1))
    try:
        yield
    finally:
        del os.environ[THREADS]
