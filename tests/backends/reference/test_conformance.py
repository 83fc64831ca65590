"""The conformance suite on the reference: every check in NumPy, smoke in the other libraries."""

import pytest

from precondattn_conformance.grid import SMOKE
from tests.backends.mechanism_groups import (
    check,
    groups,
    groups_of,
    is_never,
    is_plain,
    slow_unless,
)

CACHES = {"caching": SMOKE[1:2], "states": SMOKE[1:2]}
OF_JAX = CACHES | {"outputs": SMOKE[:1], "gradients": SMOKE[:1]}
"""JAX compiles every operation for every shape and dtype, which takes a second a case."""

# Slow: options and compositions in PyTorch and JAX. The reference is the same code in every
# library: NumPy runs all of it, and each mechanism runs in PyTorch and JAX without options.
# In JAX, more layouts too.


@pytest.mark.parametrize(
    "group",
    [
        *groups("full", "numpy", ("float64",)),
        *slow_unless(
            is_plain, groups("smoke", "torch", ("float64", "float32", "float16", "bfloat16"))
        ),
        *groups("smoke", "array_api_strict", ("float64",)),
        *groups_of("array_api_strict", "float32", CACHES),
        *slow_unless(is_plain, groups_of("jax", "float64", OF_JAX)),
        *slow_unless(is_never, groups_of("jax", "float64", {"outputs": SMOKE[1:3]})),
        *slow_unless(is_plain, groups_of("jax", "bfloat16", {"outputs": SMOKE[:1]})),
    ],
)
def test_the_reference_conforms(group):
    check(group, "reference")
