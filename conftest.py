"""The Python blocks of the README are tests; processes that test side by side share the cores."""

import os

from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=["README.md"],
    excludes=["*/README.md"],
).pytest()

# Before anything imports NumPy or PyTorch, whose threads spin while they wait for each other.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(share, 1)))

# Tests call each function that JAX compiles once or twice; to optimise its machine code costs more.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
