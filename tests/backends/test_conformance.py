"""The conformance suite on the reference, and on the blocked backends with two sizes of blocks.

The groups of a mechanism follow each other, because they share what the oracle has computed.
"""

import pytest

from precondattn_conformance.checks import CHECKS
from precondattn_conformance.grid import LESS_ONE, PACKED_BLOCKS, REAL_128, SMOKE, SPECIAL
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
    where,
)
from tests.representatives import REPRESENTATIVES

BLOCKED = {"numpy": "portable", "array_api_strict": "portable", "torch": "torch", "jax": "jax"}
PLAIN, PADDED, PACKED = SMOKE[:3]
WIDE = ("float64",)


def is_more(expression):
    return not is_plain(expression)


def is_in_jax(expression):
    return is_plain(expression) and expression in REPRESENTATIVES


def represents(expression):
    return is_declared_alone(expression) and (is_plain(expression) or expression in REPRESENTATIVES)


CACHES = {"caching": (PADDED,), "states": (PADDED,)}
OF_JAX = {"caching": (PADDED,), "gradients": (PLAIN,)}
"""JAX compiles every operation for every shape and dtype, which takes a second a case."""
MORE_OF_JAX = {"outputs": SMOKE[:3], "states": (PADDED,)}
BFLOAT16 = ("softmax", "path", "mlstm", "gated_delta", "lucid", "ccq", "differential")
"""Their outputs are also computed in bfloat16 in JAX: one mechanism of each kind of code."""
BEYOND_ORACLE = tuple(name for name in OF_NUMBERS if name != "outputs")
OTHERS = tuple(name for name in CHECKS if name not in OF_NUMBERS)
OF_BLOCKS = (LESS_ONE, PACKED_BLOCKS, REAL_128)
"""Layouts for code in blocks, which the reference has not."""

# Slow: options and compositions in PyTorch, and most mechanisms in JAX. The reference is the same
# code in every library: NumPy runs most of it, each mechanism runs in PyTorch without options, and
# the mechanisms that stand for others run in JAX.
# Slow are also more layouts and checks in JAX, and compositions in NumPy: they connect pieces that
# run alone here, and the blocked backends connect faster pieces in the same way.
#
# Thorough: all but array_api_strict. The first tier has the definitions that `tests/mathematics`
# compares, and the blocked backends, which are compared with the reference in every library.
# Outputs in NumPy are those of the oracle itself.
REFERENCE = (
    *thorough(slow_unless(represents, groups("full", "numpy", WIDE, BEYOND_ORACLE, OF_BLOCKS))),
    *thorough(slow_unless(is_declared_alone, groups("smoke", "numpy", WIDE, OTHERS))),
    *thorough(slow_unless(is_plain, groups("smoke", "torch", ("float64", "bfloat16")))),
    *groups("smoke", "array_api_strict", WIDE),
    *groups_of("array_api_strict", "float32", CACHES),
    *thorough(slow_unless(is_in_jax, groups_of("jax", "float64", OF_JAX))),
    *slow_unless(lambda mechanism: False, groups_of("jax", "float64", MORE_OF_JAX)),
    *thorough(
        slow_unless(BFLOAT16.__contains__, groups_of("jax", "bfloat16", {"outputs": (PLAIN,)}))
    ),
)

IN_FLOAT32 = {"gradients": (PLAIN,), **{n: SPECIAL[n][:2] for n in ("dtypes", "future", "threads")}}
"""Checks in which the dtype matters, and those that have no case in float64."""

# Slow: compositions in PyTorch; their wiring is the same in every library. Thorough: PyTorch, of
# which the first tier runs some data across small blocks.
DEFAULT_BLOCKS = (
    *groups("smoke", "numpy", WIDE),
    *groups_of("numpy", "float32", IN_FLOAT32),
    *groups("smoke", "array_api_strict", WIDE),
    *groups_of("array_api_strict", "float32", {"caching": (PADDED,)}),
    *thorough(slow_unless(is_declared_alone, groups("smoke", "torch", ("float32", "bfloat16")))),
    *thorough(slow_unless(is_plain, groups("smoke", "torch", ("float64", "float16")))),
    *only(is_plain, groups("smoke", "jax", ("float32",), ("outputs",))),
    *thorough(only(is_more, groups("smoke", "jax", ("float32",), ("outputs",)))),
)

IN_NUMPY = {
    "gradients": (*SMOKE[:3], SMOKE[4]),
    **dict.fromkeys(("caching", "splits", "states"), (PADDED,)),
    "packing": (PACKED,),
    "stability": ((PLAIN[0], "opposite_values"),),
}
IN_TORCH = {"gradients": (PADDED, PACKED), "caching": (PADDED,), "states": (PADDED,)}
"""Data of the first tier by check. What it leaves out has other keys or masks, and no new block."""
FIRST = (
    *groups_of("numpy", "float64", IN_NUMPY),
    *only(is_plain, groups_of("torch", "float64", IN_TORCH)),
)

# Slow: compositions, whose pieces run alone here and whose wiring is tested above; options at full,
# which run at smoke; options in PyTorch, whose algorithms are those of NumPy with other arithmetic.
# REAL_128 has no other small blocks than REAL_SHORT.
SMALL_BLOCKS = (
    *FIRST,
    *beyond(
        FIRST,
        (
            *thorough(slow_unless(is_plain, groups("full", "numpy", WIDE, OF_NUMBERS, [REAL_128]))),
            *thorough(only(has_options_alone, groups("smoke", "numpy", WIDE))),
            *thorough(slow_unless(is_plain, groups("smoke", "torch", WIDE))),
        ),
    ),
)


@pytest.mark.parametrize(
    "group",
    by_mechanism(
        (
            *where("reference", REFERENCE),
            *where("blocked", DEFAULT_BLOCKS),
            *where("small", SMALL_BLOCKS),
        )
    ),
)
def test_the_reference_and_the_blocked_backends_conform(group, request):
    if group.where == "small":
        request.getfixturevalue("small_blocks")
    check(group, "reference" if group.where == "reference" else BLOCKED[group.library])
