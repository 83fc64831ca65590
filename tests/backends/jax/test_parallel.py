"""`context_parallel` of JAX, in a process with four devices."""

from tests.backends.jax.four_devices import assert_pass_on_four_devices


def test_sequences_divided_among_four_devices():
    assert_pass_on_four_devices("parallel_on_four_devices.py")
