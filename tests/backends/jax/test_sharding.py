"""Calls that are sharded over devices. `test_sharding_check.py` has the suite's check."""

import pytest

from tests.backends.jax.four_devices import assert_pass_on_four_devices


@pytest.mark.thorough
def test_batch_and_heads_are_computed_where_they_are():
    assert_pass_on_four_devices("on_four_devices.py")
