"""Tests of the README's Python blocks; draws of Hypothesis; cores shared by parallel processes."""

import gc
import os

from hypothesis import settings
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser

from precondattn_conformance.xla import FLAGS, quick_flags

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=["README.md"],
    excludes=["*/README.md"],
).pytest()

# Before anything imports NumPy or PyTorch, whose threads spin while they wait for each other.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(share, 1)))

# Tests hold a million objects, and a search for garbage visits many of them. It runs less often
# than Python's default, which takes 7 % more time.
gc.set_threshold(20_000, 20, 20)

# Every run draws the same examples, so that a failure is a failure of the change under test.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
# New examples in every run, and the line that draws them again: `--hypothesis-profile=nightly`.
settings.register_profile("nightly", derandomize=False, print_blob=True, deadline=None)
settings.load_profile("repeatable")

# Tests call each function that JAX compiles once or twice; to optimise its machine code costs more.
os.environ.setdefault(FLAGS, quick_flags())
# Nobody reads where in the source a compiled operation comes from.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
