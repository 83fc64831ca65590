"""Steps of one token by CUDA kernels, and split calls of recurrences, in the simulator."""

import re

import numpy as np
import pytest

import precondattn as pa
from precondattn_cupy import variants
from precondattn_cupy.lucid import step as lucid_step
from tests.backends.cupy.simulated import check_step, inputs_of
from tests.backends.kernel_problems import later
from tests.kernel_tools.toolchain import needs_simulator

pytestmark = needs_simulator

ATTENTION = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 2e-2}
LUCID = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 1e-2}
HOW = ("bound", "capacity", "order", "of_state", "lengths", "key_mask")


def step(name, mechanism, held, dtype="float32", **given):
    """A parameter: a step after `held` tokens."""
    bounds = LUCID if "lucid" in mechanism else ATTENTION
    how = {"bound": bounds[dtype]} | {key: given.pop(key) for key in HOW if key in given}
    if "lucid" in mechanism:
        given = {"keys": "clustered"} | given
    return pytest.param(
        pa.parse(mechanism), held, dtype, how, given, id=f"{mechanism}: {name} {dtype}"
    )


def lengths(*now):
    return {"lengths": tuple(map(np.array, now))}


PADDED = lengths([50, 0, 17], [1, 1, 0])
MASKED = {
    "key_mask": (
        (np.arange(50) % 5 > 1)[None] & np.array([[True], [True], [False]]),
        np.array([[True], [False], [False]]),
    )
}
BOTH = ("softmax", "laser")
TWO = {"h": 4, "n": 2, "b": 2}
THREE = {"b": 3, "h": 2, "n": 2, "keys": "clustered"}
FULL = {"d": 16, "e": 16}
NARROW, SAME = {"d": 12, "e": 20}, {"d": 16, "e": 32}
CAPACITIES = ((40, 31), (40, 32), (37, 0), (37, 3))
"""Rows that are aligned or not; caches that end within a tile, and at its end."""
CLOSED = {**TWO, "e": 40, "gates": "extreme"}
STEPS = (
    *(step(f"{held}", name, held, **FULL) for name in BOTH for held in (0, 64, 65)),
    *(step("float16", name, 65, "float16", **SAME) for name in BOTH),
    *(
        step(f"{order} of {capacity}", name, 130, **TWO, e=5, order=order, capacity=capacity)
        for name, capacity, order in (("softmax", 136, "reverse"), ("laser", 140, 0))
    ),
    step("more heads than a tile has rows", "laser", 39, h=38, n=2),
    step("wide rows", "softmax", 39, d=70, e=100),
    *later(
        *(step("bfloat16", name, 65, "bfloat16", **SAME) for name in BOTH),
        *(step(f"{held}", name, held, **FULL) for name in BOTH for held in (1, 300)),
        step("more heads than a tile has rows", "softmax", 39, h=38, n=2),
        step("wide rows", "laser", 39, d=70, e=100),
    ),
    *(step(f"values of size {size}", "laser", 130, b=2, apart=size) for size in (1e-2, 100.0)),
    *(step("lengths", name, 50, b=3, **PADDED) for name in BOTH),
    *(step("masked", name, 50, b=3, **MASKED) for name in BOTH),
    *later(
        *(
            step(f"{held} of {capacity}", leaf, held, dtype, **sizes, capacity=capacity)
            for capacity, held in CAPACITIES
            for dtype, leaf, sizes in (
                ("float32", "lucid", {**TWO, **NARROW}),
                ("float16", "lucid[beta=true]", {"h": 3, "b": 2, **SAME}),
                ("bfloat16", "lucid", {"n": 2, "b": 2, **SAME}),
            )
        ),
        step("zero keys", "lucid[eps=0]", 18, **TWO, keys="zero"),
        step("zero keys", "lucid[normalize=queries_and_keys]", 18, **TWO, keys="zero"),
        # Two warps; the second one computes the key.
        step("many query heads", "lucid", 18, h=19, keys="clustered"),
        step("wide", "lucid[scale=0.1]", 34, "bfloat16", d=100, e=132, bound=2e-2),
        step("overflowing exponentials", "lucid", 35, **TWO, size=300.0, bound=1e-4),
        step("lengths", "lucid", 50, **THREE, **PADDED),
        step("masked", "lucid[beta=true]", 50, **THREE, **MASKED),
        *(
            step(f"{dtype}, order {order}", leaf, 3, dtype, **CLOSED, order=order, bound=bound)
            for leaf, dtype, order, bound in (
                ("gated_delta", "float32", None, 2e-6),
                ("gated_delta", "bfloat16", "reverse", 1.5e-2),
                ("linear", "float32", 0, 2e-6),
                ("kda", "float32", None, 2e-6),
                ("kda", "float16", 0, 2e-3),
                ("atk(kda)", "float32", 0, 2e-6),
            )
        ),
        # The key that one kernel passes to the other one has the dtype of the call.
        step("bfloat16", "atk(kda)", 3, "bfloat16", **CLOSED, bound=1.5e-2, of_state=5e-3),
        *(
            step("lengths", leaf, 50, b=3, h=1, bound=1e-6, **PADDED)
            for leaf in ("gated_delta", "kda")
        ),
    ),
)


@pytest.mark.parametrize(("mechanism", "held", "dtype", "how", "given"), STEPS)
def test_a_step_is_that_of_the_definition(mechanism, held, dtype, how, given):
    x = inputs_of(mechanism, held + 1, dtype, **given)
    out = check_step(mechanism, x, **how)
    if how.keys() & {"lengths", "key_mask"}:
        assert (out[2] == 0).all()  # The last sequence has no new token, or no key.


def test_every_branch_of_a_step_has_a_row():
    """What a row launches is what is shipped, with its dtypes."""
    attention = {"softmax": "softmax", "laser": "laser", "lucid": "lucid[beta=true]"}
    taken = set()
    for parameter in STEPS:
        mechanism, _, dtype, _, given = parameter.values
        if mechanism.name in attention:
            taken |= launched(
                attention[mechanism.name], dtype, given.get("d", 12), given.get("e", 20)
            )
    shipped = (
        launched(mechanism, dtype, *widths)
        for mechanism, dtypes, (widths, *_) in variants.STEPS
        for dtype in dtypes
    )
    assert set().union(*shipped) <= taken


def launched(mechanism, dtype, d, e):
    """The kernels of a step, with their template arguments that are no sizes."""
    launches = variants.launches(mechanism, dtype, d, e, True)
    return {re.sub(r"\b\d\d+\b", "#", launch.kernel) for launch in launches}


@pytest.mark.thorough
@pytest.mark.parametrize("processors", [1, 6])
def test_a_cache_is_read_in_one_part_or_in_one_part_for_each_tile(processors, monkeypatch):
    """A short sequence has fewer tiles."""
    monkeypatch.setattr(lucid_step, "processors", lambda: processors)
    x = inputs_of(pa.Lucid(), 21, h=2, n=2, b=3, keys="clustered")
    check_step(pa.Lucid(), x, 2e-5, **lengths([20, 0, 7], [1, 1, 0]))
