"""Full calls of every CUDA kernel and their gradients against the definition, in the simulator."""

import re

import numpy as np
import pytest

from precondattn_cupy import variants
from precondattn_cupy.configurations import Configuration
from precondattn_cupy.launch import recorded
from tests.backends.cupy.simulated import TILES, check, kernels_for, run
from tests.backends.kernel_problems import later, row, truth_of_row
from tests.kernel_tools.toolchain import needs_simulator

# What is later: the first test of each kernel compiles it for the simulator, which takes seconds.
# Those of LASER in float16 take 20 seconds; `test_tensor_cores.py` runs them too.

OPEN, NEAR = "softmax[causal=false]", "softmax[window=7]"
IDS = np.array([[2**40] * 10 + [1] * 8 + [2**40 + 2**32] * 25, [7] * 43])
"""Ids of segments of two sequences, which need 64 bits."""
EVEN = np.arange(43)[None] % 5 > 1
FIRST = {"key_mask": EVEN & np.array([[True], [False]]), "ids": IDS}
"""Some keys of the first sequence, and none of the second one."""
PADDED = {"b": 3, "h": 1, "masks": {"lengths": (0, 20, 33)}}
WIDE, HIGH = Configuration(16, 32), Configuration(32, 16)
UNEQUAL = dict(zip(TILES[:3], (HIGH, WIDE, HIGH), strict=True))
FULL = {"d": 16, "e": 16}

ATTENTION = (
    *(row(f"{t}", ("softmax", OPEN)[t % 2], t, **FULL) for t in (1, 16, 33)),
    row("bfloat16", OPEN, 33, "bfloat16", **FULL),
    row("order reversed", "softmax", 33, h=4, n=2, b=2, how={"order": "reverse"}),
    row("5, 12 wide", "softmax", 19, d=5, e=12, b=2),
    *later(
        row("float16", "softmax", 33, "float16", **FULL),
        row("order random", "softmax", 33, h=4, n=2, b=2, how={"order": 0}),
        row("20, 24 wide", "softmax", 19, d=20, e=24, b=2),
        row("in parts", "softmax", 18, d=200, e=300),
    ),
    row("one query", "softmax", 1, s=40, n=2),
    row("few queries", OPEN, 17, s=40, n=2),
    row("more queries than keys", OPEN, 40, s=17),
    *(
        row("few queries", f"softmax[window={window},causal={causal},scale=0.7]", 20, s=40)
        for window, causal in ((1, "true"), (5, "false"), (16, "true"), (17, "false"))
    ),
    row("padding", "softmax", 33, **PADDED),
    *later(row("padding", OPEN, 33, "bfloat16", **PADDED)),
    row("masked keys and segments", OPEN, 43, b=2, masks=FIRST),
    *(row("segments", leaf, 43, b=2, h=1, masks={"ids": IDS}) for leaf in ("softmax", NEAR)),
    row("both", "softmax", 20, s=51, b=2, masks={"segments": (12, 17), "lengths": (48, 51)}),
    row("small scores", "softmax", 33, size=1e-4),
    # Float32 rounds logits of that size to 1e-4, and so their exponentials.
    row("large scores", "softmax", 33, size=1e3, **FULL, how={"bound": 1e-3}),
    *later(
        row("shipped tiles", "softmax", 70, "bfloat16", h=1, how={"tiles": {}}),
        *(
            row("unequal tiles", leaf, 70, h=1, how={"tiles": UNEQUAL})
            for leaf in ("softmax", OPEN, "softmax[window=40]")
        ),
    ),
)

FAR = {"gradient_bound": 1e-4}
LASER = (
    *later(
        *(row(f"{t}", f"laser({('softmax', OPEN)[t % 2]})", t, **FULL) for t in (1, 15, 16, 17)),
        row("float32", f"laser({OPEN})", 33, **FULL),
        row("bfloat16", f"laser({OPEN})", 33, "bfloat16", **FULL),
        row("far", f"laser({OPEN})", 33, apart=100.0, how={"gradient_bound": 2e-4}),
        row("far", "laser", 33, "bfloat16", apart=100.0, how={"gradient_bound": 4e-1}),
        row("order reversed", "laser", 19, b=2, h=4, n=2, how={"order": "reverse"}),
        row("order random", "laser", 19, b=2, h=4, n=2, apart=100.0, how={"order": 0, **FAR}),
        row("one query", "laser", 1, s=40, e=5),
        row("few queries, far", f"laser({OPEN})", 17, s=40, e=5, apart=100.0, how=FAR),
        row("few queries", f"laser({NEAR})", 17, s=40, e=5),
        row("one query, far", f"laser({NEAR})", 1, s=40, e=5, apart=100.0, how=FAR),
        row("padding", "laser", 33, "bfloat16", **PADDED),
        row("padding, far", f"laser({OPEN})", 33, **PADDED, apart=100.0, how=FAR),
        row("masks", "laser", 43, b=2, masks=FIRST),
        row("masks, far", f"laser({OPEN})", 43, b=2, masks=FIRST, apart=100.0, how=FAR),
        row("wide and far", "laser", 17, s=20, e=72, apart=100.0, how=FAR),
        row("close and far heads", "laser", 17, b=2, h=4, n=2, values="one head", how=FAR),
        # Padded queries have an output of 0, far from values that differ between segments.
        *(
            row(f"{values} beside 0", "laser", 33, b=2, values=values, how=FAR, masks=masks)
            for values in ("lifted", "lifted by segment")
            for masks in ({"lengths": (33, 9), "segments": (7, 7)},)
        ),
    ),
    *later(
        row("float16", "laser", 33, "float16", **FULL),
        row("far", "laser", 33, "float16", apart=100.0, how={"gradient_bound": 1e-1}),
        slow=True,
    ),
)

BETA = "lucid_solve[beta=true]"
KEYS = {"keys": "clustered", "n": 2, "d": 8, "e": 16}
UNEQUAL_LUCID = {
    "lucid_inverse": Configuration(32, 64),
    "lucid_update": HIGH,
    "lucid_gradient": WIDE,
}
LARGE = {"lucid_inverse": Configuration(64, 256), "lucid_update": WIDE, "lucid_gradient": HIGH}
LENGTHS = ((1, None), (15, 0), (16, "reverse"), (17, 0), (32, None), (33, "reverse"), (65, None))
LUCID = later(
    *(row(f"{t}", BETA, t, **KEYS, how={"order": order}) for t, order in LENGTHS),
    row("float16", BETA, 33, "float16", **KEYS),
    *(
        row(keys, f"lucid_solve[eps={eps}]", 50, **{**KEYS, "keys": keys}, how={"bound": 1e-4})
        for keys, eps in (("equal", 0.0), ("zero", 0.0), ("zero", 1e-6))
    ),
    row("padding", BETA, 40, "float16", b=2, **KEYS, masks={"lengths": (40, 13)}),
    row("no token", BETA, 40, b=2, **KEYS, masks={"lengths": (40, 0)}),
    *(
        row("masked keys", leaf, 43, b=2, **KEYS, masks={"key_mask": EVEN | [[True], [False]]})
        for leaf in ("lucid_solve", BETA)
    ),
    row("segments", BETA, 43, b=2, **KEYS, masks={"ids": IDS}),
    *(row("narrow", "lucid_solve", 35, dtype, d=5, e=3) for dtype in ("float32", "bfloat16")),
    # No operand has 16 bits then, so almost all of the error is the rounding of the result.
    *(
        row("", "lucid_solve[normalize=given,beta=true]", 34, dtype, **KEYS, how={"bound": 5e-3})
        for dtype in ("bfloat16", "float16")
    ),
    row("wide", BETA, 70, "bfloat16", keys="clustered", d=68, e=132, how={"tiles": UNEQUAL_LUCID}),
    *(row(f"large tiles {t}", "lucid_solve", t, how={"tiles": LARGE}) for t in (20, 70, 129)),
)

ZEROED = {"filler": 0.0}
"""A call sets padding to 0 before it calls these kernels."""
RULES = ("kda", "erasing_kda", "gla", "erasing_delta", "preconditioned_key")
OTHERS = (
    *("delta[scale=0.3]", "ssd", "retention", "linear", "linear[normalize=true]"),
    *("comba[erases=decayed]", "conditioned_query", "conditioned_query[decay=head]"),
    "preconditioned_key[learned=true]",
)
RECURRENCES = later(
    row("float32", "gated_delta", 17, d=20, e=40),
    row("bfloat16", "gated_delta", 15, "bfloat16", d=20),
    row("float16", "gated_delta", 5, "float16", e=5),
    row("order reversed", "gated_delta", 7, e=35, how={"order": "reverse"}),
    row("order random", "kda", 9, e=35, how={"order": 0}),
    row("order reversed", "erasing_kda", 9, e=35, how={"order": "reverse"}),
    row("widest", "gated_delta", 9, d=256, e=5, h=1),
    row("wide", "erasing_kda", 9, d=200, e=5, h=1),
    row("two groups of channels", "kda", 9, d=40, e=5, h=1),
    *(
        row(keys, "gated_delta", 20, keys=keys, h=1, how={"bound": 1e-5})
        for keys in ("clustered", "equal")
    ),
    row("zero keys, extreme gates", "gated_delta", 19, keys="zero", gates="extreme"),
    *(
        row("equal keys, extreme gates", leaf, 19, keys="equal", gates="extreme")
        for leaf in ("kda", "erasing_kda", "gla")
    ),
    *(row("", leaf, 18) for leaf in OTHERS),
    *(row(dtype, leaf, 6, dtype) for dtype in ("bfloat16", "float16") for leaf in RULES),
    row("bfloat16", "conditioned_query[decay=head]", 17, "bfloat16"),
    *(row("one token", leaf, 1) for leaf in ("kda", "preconditioned_key")),
    *(row("few queries", leaf, 10, s=21) for leaf in ("gated_delta", "retention", "linear")),
    row("two key heads", "gated_delta", 19, h=4, n=2),
    *(
        row("masks", leaf, 20, b=2, h=1, how=ZEROED, masks=masks)
        for leaf in ("gated_delta", "kda", "erasing_kda", "preconditioned_key")
        for masks in ({"lengths": (20, 3), "segments": (8, 20)},)
    ),
    row("masked keys", "delta", 43, b=2, masks={"key_mask": EVEN}, how=ZEROED),
)

KEPT, DETACHED = (f"unit_rows[eps=0.001,detach={detach}]" for detach in ("false", "true"))
ROWS = (
    row("float16", KEPT, 1, "float16", h=1, e=1),
    row("float32", KEPT, 5, b=2, h=3),
    *later(
        row("float32", DETACHED, 5, b=2, h=3, how={"order": "reverse"}),
        row("float64", KEPT, 9, "float64", b=2, e=33, how={"order": 0}),
        row("float64", DETACHED, 9, "float64", b=2, e=33),
        row("bfloat16", KEPT, 3, "bfloat16", e=515, how={"order": "reverse"}),
        row("bfloat16", DETACHED, 3, "bfloat16", e=515, how={"order": 0}),
        row("float16", DETACHED, 9, "float16", e=33, how={"order": 0}),
    ),
)
EVERY = (*ATTENTION, *LASER, *LUCID, *RECURRENCES, *ROWS)


@needs_simulator
@pytest.mark.parametrize("made", EVERY)
def test_output_and_gradients_are_those_of_the_definition(made):
    check(made)


def test_every_branch_of_a_full_call_has_a_row():
    """What a row launches is recorded, and is every kernel that is shipped, with its dtypes."""
    taken = set()
    for parameter in EVERY:
        (made,) = parameter.values
        with recorded() as launches, np.errstate(all="ignore"):
            run(kernels_for(made.leaf), made.leaf, truth_of_row(made))
        taken |= {branch(launch.kernel) for launch in launches}
    shipped = {
        branch(launch.kernel)
        for mechanism, dtypes, ((d, e), *_) in variants.CALLS
        for dtype in dtypes
        for launch in variants.launches(mechanism, dtype, d, e)
    }
    assert shipped - taken == set()


def branch(kernel):
    """A kernel and its template arguments that are no sizes."""
    return re.sub(r"\b\d\d+\b", "#", kernel)
