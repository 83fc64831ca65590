"""`context_parallel` of JAX, in processes with several devices."""

import pytest

from tests.backends.jax.four_devices import QUICK, assert_pass_on_devices


@pytest.mark.thorough
def test_sequences_divided_among_four_devices():
    assert_pass_on_devices("parallel_on_four_devices.py", 4, QUICK)


@pytest.mark.thorough
@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_tokens_divided_among_eight_devices(marked):
    assert_pass_on_devices("tokens_on_eight_devices.py", 8, QUICK, marked)
