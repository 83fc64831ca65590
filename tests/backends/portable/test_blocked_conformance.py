"""The conformance suite on the blocked backends, with default and with small block sizes."""

import pytest

from precondattn_conformance.grid import SMOKE
from tests.backends.mechanism_groups import (
    by_mechanism,
    check,
    groups,
    groups_of,
    has_options_alone,
    is_declared_alone,
    is_plain,
    only,
    slow_unless,
    thorough,
)

BACKENDS = {
    "numpy": "portable",
    "array_api_strict": "portable",
    "torch": "torch",
    "jax": "jax",
}


# Slow: compositions in PyTorch; their wiring is the same in every library. Thorough: PyTorch, which
# the first tier runs across small blocks.
@pytest.mark.parametrize(
    "group",
    by_mechanism(
        [
            *groups("smoke", "numpy", ("float64", "float32")),
            *groups("smoke", "array_api_strict", ("float64",)),
            *groups_of("array_api_strict", "float32", {"caching": SMOKE[1:2]}),
            *thorough(
                slow_unless(
                    is_declared_alone,
                    groups("smoke", "torch", ("float64", "float32", "float16", "bfloat16")),
                )
            ),
            *groups("smoke", "jax", ("float32",), ("outputs",)),
        ]
    ),
)
def test_the_blocked_backends_conform(group):
    check(group, BACKENDS[group.library])


# Slow: compositions, whose pieces run alone here and whose wiring is tested above; options at full,
# which run at smoke; options in PyTorch, whose algorithms are those of NumPy with other arithmetic.
# Thorough: all of NumPy at full.
@pytest.mark.parametrize(
    "group",
    by_mechanism(
        [
            *thorough(slow_unless(is_plain, groups("full", "numpy", ("float64",)))),
            *only(has_options_alone, groups("smoke", "numpy", ("float64",))),
            *slow_unless(is_plain, groups("smoke", "torch", ("float64",))),
        ]
    ),
)
def test_the_blocked_backends_conform_across_small_blocks(group, small_blocks):
    check(group, BACKENDS[group.library])
