"""Other busy processes beside a run: what a data loader, or another user, does to its times.

An algorithm with many short parallel regions waits at the end of each for a thread that the
operating system has given to a neighbour. On an idle machine this does not show.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

BUSY = "while True: pass"


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """While the context lasts, `count` processes each compute on a core."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
