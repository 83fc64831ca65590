"""Tests of the README's Python blocks; draws of Hypothesis; cores shared by parallel processes."""

import gc
import os

from hypothesis import HealthCheck, settings
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser

from precondattn_conformance.process_settings import FLAGS, quick_flags

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

SLOW = [HealthCheck.too_slow]
"""Some examples are calls that JAX compiles."""

# Every run draws the same examples, so that a failure is a failure of the change under test.
settings.register_profile(
    "first",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=10,
    suppress_health_check=SLOW,
)
settings.register_profile("second", settings.get_profile("first"), max_examples=50)
# New examples in every run, and the line that draws them again: `--hypothesis-profile=nightly`.
settings.register_profile(
    "nightly", settings.get_profile("second"), derandomize=False, print_blob=True
)
settings.load_profile("first")

# Tests call each function that JAX compiles once or twice; to optimise its machine code costs more.
os.environ.setdefault(FLAGS, quick_flags())
# Nobody reads where in the source a compiled operation comes from.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")


def pytest_configure(config):
    """The second tier draws more examples, and a run may measure itself."""
    named = config.getoption("--hypothesis-profile", default=None)
    if named is None and "thorough" in config.getoption("markexpr").replace("not thorough", ""):
        settings.load_profile("second")
    # Processes of tests do not get the variable.
    file = os.environ.pop("PROCESSOR_SECONDS", None)
    if file or "processor_seconds" in getattr(config, "workerinput", ()):
        from tests.processor_time import ProcessorTime

        config.pluginmanager.register(ProcessorTime(config, file))
