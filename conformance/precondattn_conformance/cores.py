"""Cores shared by processes: each starts as many threads as leave room for the others.

NumPy's and PyTorch's threads wait for each other by spinning, and twice as many of them as there
are cores take several times as long for small arrays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

THREADS = "OMP_NUM_THREADS"
"""Read once, when the libraries are imported."""


@contextmanager
def shared_by(processes: int) -> Iterator[None]:
    """Processes that start within have their share of the cores, unless the environment says."""
    if THREADS in os.environ:
        yield
        return
    os.environ[THREADS] = str(max((os.cpu_count() or 1) // max(processes, 1), 1))
    try:
        yield
    finally:
        del os.environ[THREADS]
