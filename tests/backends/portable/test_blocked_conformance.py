"""The conformance suite on the blocked backends, with default and with small block sizes."""

import pytest

from precondattn_conformance.grid import REAL_128, SMOKE, SPECIAL
from tests.backends.mechanism_groups import (
    OF_NUMBERS,
    beyond,
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
PLAIN, PADDED, PACKED = SMOKE[:3]
IN_FLOAT32 = {"gradients": (PLAIN,), **{n: SPECIAL[n][:2] for n in ("dtypes", "future", "threads")}}
"""Checks in which the dtype matters, and those that have no case in float64."""


def is_more(expression):
    return not is_plain(expression)


# Slow: compositions in PyTorch; their wiring is the same in every library. Thorough: PyTorch, of
# which the first tier runs some data across small blocks.
@pytest.mark.parametrize(
    "group",
    by_mechanism(
        [
            *groups("smoke", "numpy", ("float64",)),
            *groups_of("numpy", "float32", IN_FLOAT32),
            *groups("smoke", "array_api_strict", ("float64",)),
            *groups_of("array_api_strict", "float32", {"caching": SMOKE[1:2]}),
            *thorough(
                slow_unless(is_declared_alone, groups("smoke", "torch", ("float32", "bfloat16")))
            ),
            *thorough(slow_unless(is_plain, groups("smoke", "torch", ("float64", "float16")))),
            *only(is_plain, groups("smoke", "jax", ("float32",), ("outputs",))),
            *thorough(only(is_more, groups("smoke", "jax", ("float32",), ("outputs",)))),
        ]
    ),
)
def test_the_blocked_backends_conform(group):
    check(group, BACKENDS[group.library])


IN_NUMPY = {
    "gradients": (*SMOKE[:3], SMOKE[4]),
    "caching": (PADDED,),
    "splits": (PADDED,),
    "states": (PADDED,),
    "packing": (PACKED,),
    "stability": ((PLAIN[0], "opposite_values"),),
}
IN_TORCH = {"gradients": (PADDED, PACKED), "caching": (PADDED,), "states": (PADDED,)}
"""Data of the first tier by check. What it leaves out has other keys or masks, and no new block."""
FIRST_IN_NUMPY = list(groups_of("numpy", "float64", IN_NUMPY))
FIRST_IN_TORCH = only(is_plain, groups_of("torch", "float64", IN_TORCH))


# Slow: compositions, whose pieces run alone here and whose wiring is tested above; options at full,
# which run at smoke; options in PyTorch, whose algorithms are those of NumPy with other arithmetic.
# REAL_128 has no other small blocks than REAL_SHORT.
@pytest.mark.parametrize(
    "group",
    by_mechanism(
        [
            *beyond(
                FIRST_IN_NUMPY,
                (
                    *thorough(
                        slow_unless(
                            is_plain,
                            groups("full", "numpy", ("float64",), OF_NUMBERS, [REAL_128]),
                        )
                    ),
                    *thorough(only(has_options_alone, groups("smoke", "numpy", ("float64",)))),
                ),
            ),
            *FIRST_IN_NUMPY,
            *beyond(
                FIRST_IN_TORCH,
                thorough(slow_unless(is_plain, groups("smoke", "torch", ("float64",)))),
            ),
            *FIRST_IN_TORCH,
        ]
    ),
)
def test_the_blocked_backends_conform_across_small_blocks(group, small_blocks):
    check(group, BACKENDS[group.library])
