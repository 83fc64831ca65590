"""Which calls Triton's kernels support, and the reasons why they decline others."""

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn.algebra.group import Group, group_of
from precondattn.backend import Request
from precondattn_triton import Triton
from precondattn_triton.target import compiling_for

SIZES = {"b": 2, "t": 8, "s": 8, "h": 2, "n": 1, "u": 2, "d": 64, "e": 64, "m": 5}
ALL = "window=21,softcap=2,sink=true,distance=slopes"
SOFTMAX = f"softmax[bias=true,{ALL}]"
STEP = {"verb": "extend", "t": 1, "s": 1}
SOLVE_IN_PATH = "lucid_solve[metric=transported/7,beta=true]"


def refusal(expression, verb="vjp", dtype="bfloat16", masks=(), device="cpu", **sizes):
    """The reason of the backend, for the leaf or for the group of all leaves."""
    mechanism = pa.parse(expression)
    leaves = mechanism.program.leaves
    piece = leaves[0] if len(leaves) == 1 else Group(group_of(expression))
    patterns = piece.inputs
    shapes = tuple((name, patterns[name].shape(SIZES | sizes)) for name in patterns)
    return Triton().refusal(piece, Request(verb, "torch", device, dtype, shapes, frozenset(masks)))


ACCEPTED = (
    *(
        (expression, size)
        for expression, size in (
            (SOFTMAX, {}), ("softmax[window=3]", {"d": 68}), ("laser", {"t": 3}),
            ("softmax[sink=true,causal=false]", {"verb": "forward"}),
            ("path[window=3,flush=7]", {"t": 3}), (SOLVE_IN_PATH, {"d": 68}),
            ("gated_delta", {"t": 3}), ("gla", {"verb": "forward"}), ("ssd", {}),
            *((f"ccq({base})", {}) for base in ("gated_delta", "retention", "linear", "gla")),
        )
    ),
    # The largest calls.
    (SOFTMAX, {"d": 256, "e": 512}),
    ("laser", {"d": 720, "e": 720}),
    ("laser", {"e": 1024}),
    ("path[window=3,flush=7]", {"d": 256, "e": 512}),
    (SOLVE_IN_PATH, {"d": 256, "e": 512}),
    ("path", {**STEP, "d": 256, "e": 256, "h": 32}),
    ("path", {"verb": "extend", "t": 4096, "s": 4096, "d": 128, "e": 512}),
    ("lucid(path[flush=2])", {"verb": "extend", "t": 2, "s": 2, "d": 128}),
    ("lucid_solve", {"dtype": "float32"}),
    ("lucid", {**STEP, "h": 63, "d": 128, "e": 128}),
    ("lucid", {**STEP, "h": 31, "d": 256, "e": 256}),
    ("lucid", {**STEP, "h": 31, "d": 256, "e": 256, "dtype": "float32"}),
    ("lucid", {"verb": "extend", "t": 15, "s": 15, "h": 3, "d": 128, "e": 128}),
    ("lucid", {"verb": "extend", "t": 16, "s": 16, "h": 4, "d": 256, "dtype": "float32"}),
)  # fmt: skip


@pytest.mark.parametrize(("expression", "sizes"), ACCEPTED)
def test_supported_calls_are_accepted(expression, sizes):
    assert refusal(expression, **sizes) is None


@pytest.mark.parametrize(
    ("expression", "changes", "reason"),
    [
        ("softmax", {}, "without options"),
        ("softmax[window=3,forget=scaled]", {}, "a forget gate"),
        ("softmax[window=3,distance=buckets]", {}, "buckets"),
        ("softmax[window=3,read=mean_and_log_sum]", {}, "no kernels"),
        ("softmax[window=3]", {"verb": "extend"}, "no step"),
        ("softmax[window=3]", {"d": 264}, "keys of width 256 at most; found 264"),
        ("softmax[window=3]", {"e": 520}, "values of width 512 at most; found 520"),
        ("softmax[window=3]", {"e": 260, "dtype": "float16"}, "of width 256 at most; found 260"),
        ("laser", {**STEP, "d": 8, "e": 300}, "e=300"),
        ("laser", {**STEP, "h": 66, "d": 8, "e": 12}, "t=1 and 66"),
        ("laser", {"dtype": "float64"}, "float64"),
        ("laser", {"d": 1028}, "keys whose width is a multiple of 4 and at most 1024; found 1028"),
        ("laser", {"e": 1028, "dtype": "float32"}, "values whose width is a multiple of 4 and at"),
        ("path[bias=true]", {}, "a bias"),
        ("path[forget=scaled]", {}, "a forget gate"),
        ("path", {"t": 9}, "more queries than keys"),
        ("path", {**STEP, "d": 256, "h": 33}, "33"),
        ("path", {"verb": "extend", "d": 192}, "several tokens supports d <= 128; found d=192"),
        ("lucid_solve[window=3]", {}, "no window"),
        ("lucid_solve[normalize=rows]", {}, "unit diagonal"),
        ("lucid_solve[metric=transported]", {**STEP, "d": 192}, "found d=192"),
        ("lucid_solve[metric=transported]", {**STEP, "masks": ("segment_ids",)}, "packed"),
        ("lucid[metric=dot](path)", {**STEP, "d": 128}, "same keys"),
        ("lucid_solve", {"dtype": "float64"}, "float64"),
        ("lucid_solve", {"device": "cuda"}, "interprets"),
        ("lucid_solve", {"d": 264}, "d=264"),
        ("lucid_solve", {"b": 0}, "empty"),
        ("lucid_solve", {"s": 5, "verb": "extend"}, "16 or more"),
        ("lucid_solve", {"s": 20, "verb": "extend", "masks": ("segment_ids",)}, "packed"),
        ("lucid", {**STEP, "h": 32, "d": 256}, "d=256"),
        ("lucid", {**STEP, "h": 32, "d": 8, "dtype": "float32"}, "d=8"),
        ("lucid", {"verb": "extend", "t": 15, "s": 15, "h": 4, "d": 128}, "fit a tile"),
        ("gla", {"d": 264, "dtype": "float32"}, "d <= 256 and e <= 512; found d=264"),
        ("gsa", {"m": 257}, "m=257"),
        ("linear", {"b": 40000, "n": 2}, "65535 heads"),
        ("conditioned_query", {"d": 300}, "d=300"),
        ("ccq(rwkv6)", {}, "no kernels"),
        ("ccq[covariance=decayed](retention)", {}, "no decay"),
        ("ccq(linear[normalize=true])", {}, "one recurrence"),
        ("ccq(ssd)", {"verb": "extend"}, "no step"),
        ("unit_rows[axis=channel]", {}, "channels"),
        ("unit_rows", {"e": 520}, "520"),
        ("unit_rows", {"dtype": "float16"}, "eps"),
    ],
)  # fmt: skip
def test_calls_without_a_kernel_are_declined_with_the_reason(expression, changes, reason):
    assert reason in refusal(expression, **changes)


def test_on_amd_calls_that_fit_are_supported():
    with compiling_for("gfx942"):
        assert refusal("lucid_solve") is None
        assert "found 128" in refusal("lucid_solve", e=128)


@pytest.mark.parametrize(
    ("mechanism", "backends"),
    [
        ("softmax[window=3]", ("triton",)),
        ("softmax", ("torch",)),
        ("lucid(softmax[window=3])", ("torch", "triton")),
        ("lucid", ("triton", "torch")),
        ("row_normalized(softmax[window=3])", ("triton", "triton")),
    ],
)
def test_a_plan_runs_what_the_kernels_support(mechanism, backends):
    inputs = pa.parse(mechanism).inputs
    x = {name: torch.ones(pattern.shape(SIZES)) for name, pattern in inputs.items()}
    assert pa.parse(mechanism).explain(**x, backend=("triton", "torch")).backends == backends
