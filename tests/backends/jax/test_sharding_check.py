"""The suite's check `sharding`, in a process with several devices."""

import pytest

from tests.backends.jax.four_devices import assert_pass_on_four_devices


@pytest.mark.thorough
def test_the_check_passes_and_finds_faults():
    assert_pass_on_four_devices("on_four_devices_the_check.py")
