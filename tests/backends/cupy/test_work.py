"""The declared work of kernels: the grids that the backend launches, and the pairs of tokens."""

import math
from collections import defaultdict

import pytest

from precondattn_cupy import variants, work
from precondattn_cupy.work import TiledSize

TOKENS = 1024
OF = {
    "lucid_solve[beta=true]": (
        work.lucid_systems,
        work.lucid_join,
        work.lucid_apply,
        work.lucid_update,
        work.lucid_key_gradient,
    ),
    "softmax": (work.softmax_forward, work.softmax_query_gradient, work.softmax_key_gradient),
    "gated_delta": (
        work.delta_prepare,
        work.carry_states,
        work.read_chunks,
        work.carry_gradients,
    ),
}
SIZES = [(name, size) for name in OF for size in ((64, 64), (128, 128))]


@pytest.mark.parametrize(("mechanism", "widths"), SIZES)
def test_programs_are_those_that_the_backend_launches(mechanism, widths):
    size = TiledSize(variants.HEADS, TOKENS, *widths)
    grids = defaultdict(list)
    for launch in variants.launches(mechanism, "bfloat16", *widths):
        grids[launch.kernel.split("<")[0]].append(math.prod(launch.grid))
    for function in OF[mechanism]:
        stated = function(size)
        # The gradient launches some kernels of the forward pass again.
        launched = grids[stated.kernel]
        assert sorted(launched) in (sorted(stated.launches), sorted(2 * stated.launches))


@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (256, 128)])
def test_products_are_at_least_those_of_the_definition(widths):
    d, e = widths
    size = TiledSize(1, TOKENS, d, e)
    pairs = TOKENS**2 / 2
    block = size.tiles("lucid_inverse").columns
    assert pairs * 2 * (d + e) < work.softmax_forward(size).half
    assert work.softmax_forward(size).half < 1.1 * pairs * 2 * (d + e)
    later = (TOKENS // block) * (TOKENS // block - 1) / 2 * block**2
    assert work.lucid_update(size).half == later * 2 * (d + e)
    assert work.carry_states(size).tf32 == 4 * TOKENS * d * e
