"""The conformance suite on the reference: every check in NumPy, smoke in the other libraries."""

import pytest

from precondattn_conformance.checks import CHECKS
from precondattn_conformance.grid import LESS_ONE, PACKED_BLOCKS, REAL_128, SMOKE
from tests.backends.mechanism_groups import (
    OF_NUMBERS,
    by_mechanism,
    check,
    groups,
    groups_of,
    is_declared_alone,
    is_plain,
    slow_unless,
    thorough,
)
from tests.representatives import REPRESENTATIVES

CACHES = {"caching": SMOKE[1:2], "states": SMOKE[1:2]}
OF_JAX = {"caching": SMOKE[1:2], "gradients": SMOKE[:1]}
"""JAX compiles every operation for every shape and dtype, which takes a second a case."""
BEYOND_ORACLE = tuple(name for name in OF_NUMBERS if name != "outputs")
OF_BLOCKS = (LESS_ONE, PACKED_BLOCKS, REAL_128)
"""Layouts for code in blocks, which the reference has not."""
OTHERS = tuple(name for name in CHECKS if name not in OF_NUMBERS)
MORE_OF_JAX = {"outputs": SMOKE[:3], "states": SMOKE[1:2]}


def is_in_jax(expression):
    return is_plain(expression) and expression in REPRESENTATIVES


def represents(expression):
    return is_declared_alone(expression) and (is_plain(expression) or expression in REPRESENTATIVES)


# Slow: options and compositions in PyTorch, and most mechanisms in JAX. The reference is the same
# code in every library: NumPy runs most of it, each mechanism runs in PyTorch without options, and
# the mechanisms that stand for others run in JAX.
# Slow are also more layouts and checks in JAX, and compositions in NumPy: they connect pieces that
# run alone here, and `test_blocked_conformance.py` connects faster pieces in the same way.
#
# Thorough: all but array_api_strict. The first tier has the definitions that `tests/mathematics`
# compares, and the blocked backends, which are compared with the reference in every library.
# Outputs in NumPy are those of the oracle itself.


@pytest.mark.parametrize(
    "group",
    by_mechanism(
        [
            *thorough(
                slow_unless(
                    represents, groups("full", "numpy", ("float64",), BEYOND_ORACLE, OF_BLOCKS)
                )
            ),
            *thorough(
                slow_unless(is_declared_alone, groups("smoke", "numpy", ("float64",), OTHERS))
            ),
            *thorough(slow_unless(is_plain, groups("smoke", "torch", ("float64", "bfloat16")))),
            *groups("smoke", "array_api_strict", ("float64",)),
            *groups_of("array_api_strict", "float32", CACHES),
            *thorough(slow_unless(is_in_jax, groups_of("jax", "float64", OF_JAX))),
            *slow_unless(lambda mechanism: False, groups_of("jax", "float64", MORE_OF_JAX)),
            *thorough(slow_unless(is_in_jax, groups_of("jax", "bfloat16", {"outputs": SMOKE[:1]}))),
        ]
    ),
)
def test_the_reference_conforms(group):
    check(group, "reference")
