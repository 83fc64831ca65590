"""Full calls of Pallas kernels for a GPU and their gradients, interpreted.

Chunks of recurrences have 16 tokens; those with a decay for each channel also 64, in four tiles,
some of which are between two others.
"""

import numpy as np
import pytest

pytest.importorskip("jax")


from precondattn.kernel_backend.kernel_table import recurrences_in
from precondattn.kernel_backend.precise import VARIABLE
from precondattn_pallas.backend import CUDA, KERNELS, kernels_of
from precondattn_pallas.configurations import Configuration
from precondattn_pallas.lucid.solve import LucidSolveKernels
from precondattn_pallas.precision import Products
from precondattn_pallas.recurrence.chunk_inverse import unit_lower_inverse
from tests.backends.kernel_problems import (
    error,
    later,
    leaf_of,
    problem,
    require_same_beside_nan,
    row,
    truth_of_row,
)
from tests.backends.pallas.tiles import (
    BOUNDS,
    check_extension,
    check_row,
    chunks_of,
    rounded,
    run,
)

OPEN = "softmax[causal=false]"
HEADS = {"b": 2, "h": 4, "n": 2}
PACKED = {"segments": (20, 9)}
HIDDEN = (np.arange(65) % 3 > 0) & (np.arange(65) > 35) & np.ones((2, 1), bool)
"""Full tiles of keys and full segments are masked."""
BOTH = {"lengths": (40, 3), **PACKED}

ATTENTION = (
    row("float32", "softmax", 65, **HEADS),
    row("bfloat16", "softmax", 33, "bfloat16", s=65, **HEADS),
    row("float16", OPEN, 31, "float16", s=63, **HEADS),
    row("few queries", "softmax[window=20]", 40, s=65, **HEADS),
    *later(
        row("lengths", "softmax", 40, s=50, **HEADS, masks={"lengths": (50, 3)}),
        row("segments", "softmax", 49, s=65, **HEADS, masks=PACKED),
    ),
    row("masked", OPEN, 65, "bfloat16", **HEADS, masks={"key_mask": HIDDEN, **PACKED}),
    row("one token", "softmax[scale=0.1]", 1, **HEADS),
    *later(
        row("whole tiles", "softmax[window=5,causal=false]", 64, **HEADS),
        row("huge scores", "softmax", 40, n=2, size=1000.0, how={"bound": 1e-4}),
    ),
    row("float32", "laser", 65, **HEADS),
    row("few queries", f"laser({OPEN})", 31, "float16", s=63, **HEADS, apart=3.0),
    row("far", "laser(softmax[window=9])", 33, **HEADS, apart=100.0, masks=PACKED),
    *later(
        row("lengths", "laser", 33, s=50, **HEADS, masks={"lengths": (50, 3)}),
        row("no token", "laser", 20, **HEADS, apart=100.0, masks={"lengths": (20, 0)}),
        # Padded queries have an output of 0, far from values that differ between segments.
        *(
            row(values, "laser", 20, **HEADS, values=values, masks=masks, how={"bound": 5e-5})
            for values, masks in (
                ("lifted", {"lengths": (20, 7)}),
                ("lifted by segment", {"lengths": (20, 7)}),
                ("lifted by segment", {"segments": (3, 7)}),
            )
        ),
    ),
)

BETA = "lucid_solve[beta=true]"
KEYS = {"b": 2, "n": 2, "keys": "clustered"}
SHIPPED = {
    "lucid_inverse": Configuration(64, 128),
    "lucid_update": Configuration(64, 32),
    "lucid_gradient": Configuration(16, 32),
}
LUCID = (
    row("float16", BETA, 65, "float16", **KEYS),
    row("segments", "lucid_solve", 70, **KEYS, masks={"segments": (7, 40)}),
    *later(
        row("equal keys", "lucid_solve[eps=0]", 50, keys="equal", how={"bound": 1e-4}),
        row("padding", BETA, 40, "bfloat16", b=2, keys="clustered", masks={"lengths": (40, 0)}),
        row("wide keys", "lucid_solve", 18, "bfloat16", d=136, e=8),
        row("float32", BETA, 129, **KEYS),
        *(
            row("zero keys", f"lucid_solve[eps={eps}]", 50, keys="zero", how={"bound": 1e-4})
            for eps in (0, 1e-6)
        ),
        row("wide values", "lucid_solve", 18, "bfloat16", d=16, e=136),
        row("given", "lucid_solve[normalize=given]", 34, "bfloat16", keys="clustered"),
        row("shipped tiles", BETA, 130, keys="clustered", how={"tiles": SHIPPED}),
    ),
)

OF_64 = {"tiles": chunks_of(64)}
MASKED = {"key_mask": np.arange(40).reshape(2, 20) % 7 > 2}
RECURRENCES = (
    row("clustered keys", "gated_delta", 40, keys="clustered", h=1, how={"bound": 1e-4}),
    row("zero keys, extreme gates", "gated_delta", 40, h=4, n=2, keys="zero", gates="extreme"),
    row("", "linear[normalize=true]", 20, h=4, n=2),
    *later(
        row("", "ssd", 20, h=4, n=2),
        row("masks", "gated_delta", 40, b=2, h=1, masks=BOTH),
        row("keys", "conditioned_query", 9, s=20, **HEADS, masks=MASKED, how={"bound": 1e-5}),
        row("float32", "gated_delta", 33, **HEADS),
        row("wide", "gated_delta", 31, "bfloat16", d=40, e=72, **HEADS),
        row("one token", "gated_delta", 1, "float16", d=8, e=8, **HEADS),
        *(row("", leaf, 20, h=4, n=2) for leaf in ("delta[scale=0.3]", "retention")),
        row("bfloat16", "conditioned_query[decay=head]", 20, "bfloat16", h=4, n=2),
        *(row("bfloat16", leaf, 65, "bfloat16", how=OF_64, e=72) for leaf in ("gla", "kda")),
        row("extreme", "kda", 63, h=1, gates="extreme", keys="clustered", how=OF_64),
        *(
            row("masks", leaf, 70, dtype, b=2, h=1, gates="extreme", masks=masks, how=OF_64)
            for leaf, dtype in (
                ("gla[scale=0.3]", "float32"),
                ("gsa", "float16"),
                ("kda[scale=0.3]", "float16"),
            )
            for masks in ({"lengths": (70, 3), **PACKED},)
        ),
        *(
            row(dtype, leaf, t, dtype, h=4, n=2, gates="extreme" if t > 30 else "random")
            for leaf, t, dtype in (
                ("hgrn2", 33, "float32"),
                ("gdn2[scale=0.3]", 33, "float32"),
                ("comba[scale=0.3]", 33, "float32"),
                ("comba[erases=decayed]", 17, "float16"),
                ("delta_product[steps=3,scale=0.3]", 9, "bfloat16"),
                ("erasing_delta", 17, "float32"),
                ("erasing_gated_delta", 33, "float32"),
                ("erasing_kda", 17, "float16"),
                ("erasing_gdn2", 17, "float32"),
                ("preconditioned_key", 33, "float32"),
                ("preconditioned_key[learned=true]", 9, "bfloat16"),
            )
        ),
    ),
)
EVERY = (*ATTENTION, *LUCID, *RECURRENCES)


@pytest.mark.parametrize("made", EVERY)
def test_output_and_gradients_are_those_of_the_definition(made):
    check_row(made)


def test_every_leaf_with_kernels_has_a_row():
    table = KERNELS[CUDA]
    leaves = {*recurrences_in(table), *(leaf for leaf in table if isinstance(leaf, type))}
    assert {leaf.name for leaf in leaves} == {each.values[0].leaf.name for each in EVERY}


@pytest.mark.parametrize(
    "leaf",
    [
        "gated_delta",
        *(
            pytest.param(leaf, marks=pytest.mark.thorough)
            for leaf in ("comba", "gsa", "kda", "erasing_kda")
        ),
    ],
)
def test_an_extension_and_its_gradient(leaf):
    leaf = leaf_of(leaf)
    x, cotangent = problem(leaf, 19, h=4, n=2)
    check_extension(kernels_of(leaf, interpret=True), leaf, x, cotangent, **chunks_of(16))


@pytest.mark.thorough
def test_lucid_multiplies_no_tiles_of_other_segments():
    """Entries of Φ between segments are 0, but multiplying them by NaN would give NaN."""
    lengths = (64, 64, 16)
    ids = np.repeat(np.arange(3), lengths)[None]
    made = row("", BETA, sum(lengths), keys="clustered", masks={"ids": ids}).values[0]
    require_same_beside_nan(LucidSolveKernels(interpret=True), made, ids, run)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_each_channel_of_lucid_is_as_accurate_as_alone(dtype):
    """The largest float16 is 65504."""
    made = row("", "lucid_solve", 34, dtype, keys="clustered", values="channels").values[0]
    truth = truth_of_row(made)
    y = run(LucidSolveKernels(interpret=True), made.leaf, truth)[0]
    for channel in range(truth.out.shape[3]):
        assert error(y[..., channel], truth.out[..., channel]) < BOUNDS[dtype]


@pytest.mark.thorough
@pytest.mark.parametrize("keys", ["clustered", "equal"])
def test_coinciding_keys_cost_a_precise_kernel_no_accuracy_in_float16(monkeypatch, keys):
    monkeypatch.setenv(VARIABLE, "1")
    check_row(row("", "delta", 40, "float16", keys=keys, h=1, how={"bound": 8e-4}).values[0])


@pytest.mark.parametrize("keys", ["clustered", "equal"])
def test_an_inverse_of_64_tokens_is_accurate(keys):
    """The Neumann series by repeated doubling would lose all digits."""
    k = problem(leaf_of("delta"), 64, h=1, keys=keys)[0]["k"][0, :, 0]
    given, strict = rounded(np.tril(2 * k @ k.T, -1), "float32")
    result = unit_lower_inverse(Products(interpret=True, tf32=False), given)
    assert error(result, np.linalg.inv(np.eye(64) + strict)) < 2e-5
