"""Processes that compute together: `python -m tests.ranks MODULE COUNT ARGUMENTS`.

This process imports the module and those that its function `imports(COUNT, *ARGUMENTS)` names, and
forks once for each rank; each copy calls the function `main(rank, COUNT, *ARGUMENTS)`. Importing
PyTorch takes longer than most of what the ranks compute.
"""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from importlib import import_module

from precondattn.dispatch.discovery import discover


@contextmanager
def ranks(module, count, *arguments, **options):
    """The process of all ranks. They are ended where the context ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.ranks", module, *map(str, (count, *arguments))],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        **options,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_ranks(module, count, *arguments):
    """Wait until all ranks have ended without an error."""
    with ranks(module, count, *arguments) as process:
        assert process.wait(timeout=600) == 0


def main(module, count, *arguments):
    """The exit code: 0, or that of a rank that failed."""
    worker = import_module(module)
    for name in worker.imports(count, *arguments):
        import_module(name)
    discover()
    copies = []
    for rank in range(count):
        copy = os.fork()
        if copy == 0:
            worker.main(rank, count, *arguments)
            return 0
        copies.append(copy)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])) for copy in copies)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
