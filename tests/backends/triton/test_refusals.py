"""Which calls Triton's kernels support, and the reasons why they decline others."""

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn.algebra.group import Group, group_of
from precondattn.backend import Request, UnsupportedError
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


@pytest.mark.parametrize("size", [{}, {"d": 68}, {"t": 3}, {"verb": "forward"}])
@pytest.mark.parametrize(
    "expression",
    [
        SOFTMAX, "softmax[window=3]", "softmax[sink=true,causal=false]", "laser",
        "laser(softmax[causal=false])", "path[window=3,flush=7]", SOLVE_IN_PATH,
        "gated_delta", "gla", "ssd",
        *(f"ccq({base})" for base in ("gated_delta", "delta", "retention", "linear", "gla", "kda")),
    ],
)  # fmt: skip
def test_supported_calls_are_accepted(expression, size):
    assert refusal(expression, **size) is None


@pytest.mark.parametrize(
    ("expression", "sizes"),
    [
        (SOFTMAX, {"d": 256, "e": 512}),
        ("laser", {"d": 720, "e": 720}),
        ("laser", {"e": 1024}),
        ("path[window=3,flush=7]", {"d": 256, "e": 512}),
        (SOLVE_IN_PATH, {"d": 256, "e": 512}),
        ("path", {"verb": "extend", "t": 1, "s": 1, "d": 256, "e": 256, "h": 32}),
        ("path", {"verb": "extend", "t": 2, "s": 2, "d": 128, "e": 256}),
        ("path", {"verb": "extend", "t": 4096, "s": 4096, "d": 128, "e": 512}),
        ("lucid_solve[metric=transported]", {"verb": "extend", "s": 1, "d": 128}),
        ("lucid(path[flush=2])", {"verb": "extend", "t": 2, "s": 2, "d": 128}),
        ("lucid_solve", {"dtype": "float32"}),
        ("lucid", {**STEP, "h": 63, "d": 128, "e": 128}),
        ("lucid", {**STEP, "h": 31, "d": 256, "e": 256}),
        ("lucid", {**STEP, "h": 31, "d": 256, "e": 256, "dtype": "float32"}),
        ("lucid", {"verb": "extend", "t": 15, "s": 15, "h": 3, "d": 128, "e": 128}),
        ("lucid", {"verb": "extend", "t": 8, "s": 8, "h": 3, "d": 256, "e": 256}),
        ("lucid", {"verb": "extend", "t": 15, "s": 15, "h": 1, "d": 128, "dtype": "float32"}),
        ("lucid", {"verb": "extend", "t": 16, "s": 16, "h": 4, "d": 256, "dtype": "float32"}),
    ],
)  # fmt: skip
def test_the_largest_supported_calls_are_accepted(expression, sizes):
    assert refusal(expression, **sizes) is None


@pytest.mark.parametrize(
    ("expression", "changes", "reason"),
    [
        ("softmax", {}, "without options"),
        ("softmax[scale=2,causal=false]", {}, "without options"),
        ("softmax[window=3,forget=scaled]", {}, "a forget gate"),
        ("softmax[window=3,distance=buckets]", {}, "buckets"),
        ("softmax[window=3,read=mean_and_log_sum]", {}, "no kernels"),
        ("softmax[window=3]", {"verb": "extend"}, "no step"),
        ("softmax[window=3]", {"d": 264}, "keys of width 256 at most; found 264"),
        ("softmax[window=3]", {"e": 520}, "values of width 512 at most; found 520"),
        ("softmax[window=3]", {"e": 260, "dtype": "float16"}, "of width 256 at most; found 260"),
        ("softmax[window=3]", {"t": 0}, "empty"),
        ("laser(softmax[forget=scaled])", {}, "a forget gate"),
        ("laser(softmax[distance=buckets])", {}, "buckets"),
        ("laser(path)", {}, "not for LASER"),
        ("laser", {"dtype": "float64"}, "float64"),
        ("laser", {"d": 1028}, "keys whose width is a multiple of 4 and at most 1024; found 1028"),
        ("laser", {"d": 66}, "found 66"),
        ("laser", {"e": 1028, "dtype": "float32"}, "values whose width is a multiple of 4 and at"),
        ("path[bias=true]", {}, "a bias"),
        ("path[forget=scaled]", {}, "a forget gate"),
        ("path", {"d": 264}, "keys of width 256 at most; found 264"),
        ("path", {"e": 520}, "values of width 512 at most; found 520"),
        ("path", {"t": 9}, "more queries than keys"),
        ("path", {"t": 0}, "empty"),
        ("path", {**STEP, "e": 300}, "e=300"),
        ("path", {**STEP, "d": 256, "h": 33}, "33"),
        ("path", {"verb": "extend", "d": 192}, "several tokens supports d <= 128; found d=192"),
        ("path", {"verb": "extend", "e": 512, "dtype": "float32"}, "width 256 at most; found 512"),
        ("lucid_solve[window=3]", {}, "no window"),
        ("lucid_solve[normalize=rows]", {}, "unit diagonal"),
        ("lucid_solve[metric=transported,window=3]", {}, "no window"),
        ("lucid_solve[metric=transported,normalize=rows]", {}, "unit diagonal"),
        ("lucid_solve[metric=transported]", {"d": 257}, "d <= 256"),
        ("lucid_solve[metric=transported]", {"e": 513}, "e <= 512"),
        ("lucid_solve[metric=transported]", {**STEP, "d": 192}, "found d=192"),
        ("lucid_solve[metric=transported]", {**STEP, "masks": ("segment_ids",)}, "packed"),
        ("lucid[metric=dot](path)", {**STEP, "d": 128}, "same keys"),
        ("lucid(path)", {**STEP, "d": 192}, "found d=192"),
        ("lucid_solve", {"dtype": "float64"}, "float64"),
        ("lucid_solve", {"device": "cuda"}, "interprets"),
        ("lucid_solve", {"d": 264}, "d=264"),
        ("lucid_solve", {"e": 520}, "e=520"),
        ("lucid_solve", {"b": 0}, "empty"),
        ("lucid_solve", {"b": 65536}, "65535 heads"),
        ("lucid_solve", {"s": 5, "verb": "extend"}, "16 or more"),
        ("lucid_solve", {"s": 20, "verb": "extend", "masks": ("segment_ids",)}, "packed"),
        ("lucid", {**STEP, "h": 64, "d": 128}, "d=128"),
        ("lucid", {**STEP, "h": 32, "d": 256}, "d=256"),
        ("lucid", {**STEP, "h": 1, "d": 264}, "d=264"),
        ("lucid", {**STEP, "h": 32, "d": 8, "dtype": "float32"}, "d=8"),
        ("lucid", {"verb": "extend", "t": 15, "s": 15, "h": 4, "d": 128}, "fit a tile"),
        ("lucid", {"verb": "extend", "t": 15, "s": 15, "d": 256, "dtype": "float32"}, "fit a tile"),
        ("gla", {"d": 264, "dtype": "float32"}, "d <= 256 and e <= 512; found d=264"),
        ("gla", {"d": 520}, "d <= 512"),
        ("gated_delta", {"d": 264}, "d=264"),
        ("gated_delta", {"e": 520}, "e=520"),
        ("gated_delta", {"b": 0}, "empty"),
        ("gsa", {"m": 257}, "m=257"),
        ("linear", {"b": 40000, "n": 2}, "65535 heads"),
        ("conditioned_query", {"d": 300}, "d=300"),
        ("ccq(rwkv6)", {}, "no kernels"),
        ("ccq[covariance=decayed](retention)", {}, "no decay"),
        ("ccq(linear[normalize=true])", {}, "one recurrence"),
        ("ccq(ssd)", {"verb": "extend"}, "no step"),
        ("ccq(ssd)", {"e": 600}, "e=600"),
        ("unit_rows[axis=channel]", {}, "channels"),
        ("unit_rows", {"e": 520}, "520"),
        ("unit_rows", {"dtype": "float16"}, "eps"),
    ],
)  # fmt: skip
def test_calls_without_a_kernel_are_declined_with_the_reason(expression, changes, reason):
    assert reason in refusal(expression, **changes)


@pytest.mark.parametrize(
    ("size", "reason"), [({"e": 300}, "e=300"), ({"h": 66, "n": 1}, "t=1 and 66")]
)
def test_a_step_of_too_many_rows_or_of_wide_values_is_an_error(size, reason):
    mechanism = pa.parse("laser")
    sizes = SIZES | {"b": 1, "t": 1, "s": 1, "d": 8, "e": 12} | size
    x = {name: torch.ones(p.shape(sizes)) for name, p in mechanism.inputs.items()}
    cache = mechanism.init_cache(**x, capacity=2)
    with pytest.raises(pa.UnsupportedError, match=reason), torch.no_grad():
        mechanism.extend(cache, **x, backend="triton")


def test_on_amd_calls_that_fit_are_supported():
    with compiling_for("gfx942"):
        assert refusal("lucid_solve") is None
        assert "found 128" in refusal("lucid_solve", e=128)


def test_an_unsupported_call_is_an_error_if_no_other_backend_is_allowed():
    with pytest.raises(UnsupportedError, match="no kernels for softmax"):
        pa.Lucid()(*torch.randn(3, 1, 8, 2, 8), backend="triton")


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


def test_in_the_interpreter_the_backend_runs_only_if_it_is_named():
    assert "triton" not in pa.Lucid().explain(*torch.randn(3, 1, 8, 2, 8)).backends
