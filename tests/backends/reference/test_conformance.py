"""The conformance suite on the reference: every check in NumPy, smoke in the other libraries."""

import pytest

from precondattn_conformance.grid import SMOKE
from tests.backends.mechanism_groups import check, groups, groups_of

CACHES = {"caching": SMOKE[1:2], "states": SMOKE[1:2]}
OF_JAX = CACHES | {"outputs": SMOKE[:3], "gradients": SMOKE[:1]}
"""JAX compiles every operation for every shape and dtype, which takes a second a case."""


@pytest.mark.parametrize(
    "group",
    [
        *groups("full", "numpy", ("float64",)),
        *groups("smoke", "torch", ("float64", "float32", "float16", "bfloat16")),
        *groups("smoke", "array_api_strict", ("float64",)),
        *groups_of("array_api_strict", "float32", CACHES),
        *groups_of("jax", "float64", OF_JAX),
        *groups_of("jax", "bfloat16", {"outputs": SMOKE[:1]}),
    ],
)
def test_the_reference_conforms(group):
    check(group, "reference")
