"""Sharding over devices: `on_four_devices.py`, in a process of its own that has four of them."""

import os
import subprocess
import sys
from pathlib import Path

# JAX's locations of operations hold the Python stack, which is deep in pytest, and XLA then takes
# minutes to simplify loops.
ENVIRONMENT = {"JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0"}
FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"


def test_batch_and_heads_are_computed_where_they_are():
    tests = Path(__file__).with_name("on_four_devices.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", tests],
        env={**os.environ, **ENVIRONMENT, "XLA_FLAGS": FLAGS},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
