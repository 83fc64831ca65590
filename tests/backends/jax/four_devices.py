"""Tests in a process of their own, which has several devices."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from precondattn.frameworks.jax import mesh_axes

# JAX's locations of operations hold the Python stack, which is deep in pytest, and XLA then takes
# minutes to simplify loops.
ENVIRONMENT = {"JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0"}
DEVICES = "--xla_force_host_platform_device_count={}"
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""XLA's flags for compiling in half the time, for tests that compile much and compute little."""


def assert_pass_on_four_devices(name):
    """The tests of a file, by its path from this folder."""
    assert_pass_on_devices([name], 4)


def assert_pass_on_devices(names, count, flags="", marked="not slow"):
    """The marked tests of files, by their paths from this folder, in one process."""
    tests = [Path(__file__).parent / name for name in names]
    plain = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", marked]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plain, *tests],
        env={
            **os.environ,
            **ENVIRONMENT,
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {DEVICES.format(count)} {flags}",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.fixture
def told(monkeypatch):
    """The warnings of one test, with those that are given once per process."""
    monkeypatch.setattr(mesh_axes, "_warned", set())
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        yield records
