"""The conformance suite on the reference: every check in NumPy, smoke in the other libraries."""

import pytest

from precondattn_conformance.grid import SMOKE
from tests.backends.mechanism_groups import (
    by_mechanism,
    check,
    groups,
    groups_of,
    is_declared_alone,
    is_never,
    is_plain,
    slow_unless,
    thorough,
)

CACHES = {"caching": SMOKE[1:2], "states": SMOKE[1:2]}
OF_JAX = {"caching": SMOKE[1:2], "gradients": SMOKE[:1]}
"""JAX compiles every operation for every shape and dtype, which takes a second a case."""
MORE_OF_JAX = {"outputs": SMOKE[:3], "states": SMOKE[1:2]}

# Slow: options and compositions in PyTorch and JAX. The reference is the same code in every
# library: NumPy runs all of it, and each mechanism runs in PyTorch and JAX without options. Of the
# dtypes of half precision, PyTorch runs float16, and JAX bfloat16.
# Slow are also more layouts and checks in JAX, and compositions in NumPy: they connect pieces that
# run alone here, and `test_blocked_conformance.py` connects faster pieces in the same way.
#
# Thorough: all but array_api_strict. The first tier has the definitions that `tests/mathematics`
# compares, and the blocked backends, which are compared with the reference in every library.


@pytest.mark.parametrize(
    "group",
    by_mechanism(
        [
            *thorough(slow_unless(is_declared_alone, groups("full", "numpy", ("float64",)))),
            *thorough(slow_unless(is_plain, groups("smoke", "torch", ("float64", "float16")))),
            *groups("smoke", "array_api_strict", ("float64",)),
            *groups_of("array_api_strict", "float32", CACHES),
            *thorough(slow_unless(is_plain, groups_of("jax", "float64", OF_JAX))),
            *slow_unless(is_never, groups_of("jax", "float64", MORE_OF_JAX)),
            *thorough(slow_unless(is_plain, groups_of("jax", "bfloat16", {"outputs": SMOKE[:1]}))),
        ]
    ),
)
def test_the_reference_conforms(group):
    check(group, "reference")
