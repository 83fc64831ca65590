"""Calls that are sharded over devices, and sequences that are divided among them."""

import pytest

from tests.backends.jax.four_devices import QUICK, assert_pass_on_devices

FILES = ("sharded", "tokens")


@pytest.mark.thorough
def test_calls_on_several_devices():
    """The tests share a process, which has eight devices."""
    assert_pass_on_devices([f"{name}_on_devices.py" for name in FILES], 8, QUICK)


@pytest.mark.slow
def test_more_calls_on_several_devices():
    assert_pass_on_devices(["tokens_on_devices.py"], 8, QUICK, "slow")
