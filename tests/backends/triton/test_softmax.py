"""Softmax attention's Triton kernels against the definition, in the interpreter."""

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn.backend import ArraySpec, Request
from precondattn.frame import full_frame
from precondattn.kernel_backend.precise import VARIABLE
from precondattn_conformance.tolerance import error
from precondattn_triton import Triton
from precondattn_triton.configurations import Configuration
from precondattn_triton.softmax.leaf import SoftmaxKernels
from tests.backends.triton.tiles import SMALL, tiles_as_given

BOUND = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
EVERYTHING = "softmax[window=21,bias=true,softcap=2,sink=true,distance=slopes]"


def problem(expression, t, s=None, *, b=1, h=1, n=1, d=16, e=8, dtype=torch.float32, shared=""):
    """Inputs, and a cotangent; the bias has one entry along the axes in `shared`."""
    torch.manual_seed(t)
    sizes = {"b": b, "t": t, "s": s or t, "h": h, "n": n, "d": d, "e": e}
    shapes = {name: p.shape(sizes) for name, p in pa.parse(expression).inputs.items()}
    if "bias" in shapes:
        own = (1 if axis in shared else sizes[axis] for axis in "bh")
        shapes["bias"] = (*own, t, s or t)
    x = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    if "slopes" in x:
        x["slopes"] = 0.1 * x["slopes"].abs()
    return x, torch.randn(b, t, h, e).to(dtype)


def wide(array):
    return array.double().numpy()


def run_kernels(expression, x, d_out, *, seed=0, tiles=SMALL, **masks):
    """Output and gradients by the kernels."""
    leaf, kernels = pa.parse(expression), SoftmaxKernels()
    frame = full_frame(x["q"].shape[1], x["k"].shape[1], x["q"], **masks)
    with torch.no_grad(), tiles_as_given(seed, tiles):
        out, residuals = kernels.forward(leaf, x, frame)
        gradients = kernels.backward(leaf, x, frame, out, residuals, d_out)
    specs = {name: ArraySpec.of(array) for name, array in x.items()}
    assert [ArraySpec.of(r) for r in residuals] == list(kernels.residual_shapes(leaf, specs))
    return out, gradients


def check(expression, x, d_out, *, seed=0, tiles=SMALL, bound=None, **masks):
    """The kernels agree with the definition in float64, and write to none of the inputs."""
    before = {name: a.clone() for name, a in x.items()}
    out, gradients = run_kernels(expression, x, d_out, seed=seed, tiles=tiles, **masks)
    mechanism = pa.parse(expression)
    with pa.use_backend("reference"):
        right, pullback = mechanism.vjp(**{name: a.double() for name, a in x.items()}, **masks)
        expected = pullback(d_out.double())
    bound = bound or BOUND[x["v"].dtype]
    assert out.dtype == x["v"].dtype
    assert error(wide(out), wide(right)) < bound
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradients[name].dtype == x[name].dtype
        assert gradients[name].shape == x[name].shape
        assert error(wide(gradients[name]), wide(gradient)) < 2 * bound, name
        torch.testing.assert_close(x[name], before[name], rtol=0, atol=0, equal_nan=True)
    return out, gradients


@pytest.mark.parametrize(
    "expression",
    [
        "softmax[window=3]",
        "softmax[causal=false,window=17]",
        "softmax[bias=true]",
        "softmax[softcap=2]",
        "softmax[sink=true]",
        "softmax[distance=slopes]",
        "softmax[causal=false,distance=slopes]",
        EVERYTHING,
    ],
)
def test_output_and_gradients_with_every_option(expression):
    check(expression, *problem(expression, 49, h=2))


@pytest.mark.parametrize(
    ("t", "s", "h", "n", "d", "e", "dtype"),
    [
        (1, 40, 2, 1, 12, 16, torch.float32),
        (15, 15, 2, 2, 16, 20, torch.bfloat16),
        (17, 33, 4, 2, 20, 12, torch.float16),
        (33, 33, 1, 1, 8, 8, torch.bfloat16),
    ],
)
def test_all_options_at_every_size_and_dtype(t, s, h, n, d, e, dtype):
    check(EVERYTHING, *problem(EVERYTHING, t, s, h=h, n=n, d=d, e=e, dtype=dtype))


@pytest.mark.parametrize("shared", ["b", "h", "bh", ""])
def test_the_gradient_of_a_bias_is_a_sum_over_those_who_share_it(shared):
    expression = "softmax[bias=true,causal=false]"
    check(expression, *problem(expression, 20, 33, b=2, h=4, n=2, shared=shared))


def test_pairs_that_a_bias_masks_and_rows_without_any():
    x, d_out = problem("softmax[bias=true,sink=true]", 20)
    x["bias"][..., 3:9] = -torch.inf
    x["bias"][..., 17, :] = -torch.inf
    out, gradients = check("softmax[bias=true,sink=true]", x, d_out)
    assert (out[:, 17] == 0).all()
    assert (gradients["q"][:, 17] == 0).all()


@pytest.mark.parametrize("causal", ["true", "false"])
@pytest.mark.parametrize("window", [2, 5, 16, 33, 100, 2**31])
def test_windows_of_any_size(window, causal):
    expression = f"softmax[window={window},causal={causal}]"
    check(expression, *problem(expression, 50, 70))


@pytest.mark.parametrize("causal", ["true", "false"])
def test_a_window_of_one_key_has_no_gradient_of_scores(causal):
    expression = f"softmax[window=1,causal={causal}]"
    x, d_out = problem(expression, 33, 50)
    out, gradients = run_kernels(expression, x, d_out)
    torch.testing.assert_close(out, x["v"][:, 17:])
    assert gradients["q"].abs().max() < 1e-6
    assert gradients["k"].abs().max() < 1e-6
    torch.testing.assert_close(gradients["v"][:, 17:], d_out)
    assert (gradients["v"][:, :17] == 0).all()


def test_more_queries_than_keys():
    expression = "softmax[window=20,causal=false,distance=slopes]"
    check(expression, *problem(expression, 40, 17))


def test_tiles_of_queries_and_keys_may_differ():
    high, broad = Configuration(32, 16), Configuration(16, 32)
    tiles = {"forward": broad, "query_gradient": high, "key_gradient": high, "bias_gradient": broad}
    tiles = {**SMALL, **{f"softmax_{name}": cut for name, cut in tiles.items()}}
    for expression in (EVERYTHING, "softmax[window=50,causal=false,bias=true]"):
        check(expression, *problem(expression, 90, shared="b"), tiles=tiles)


@pytest.mark.parametrize("causal", ["true", "false"])
def test_padding_may_contain_nan(causal):
    expression = f"softmax[causal={causal},window=12,bias=true,softcap=3,sink=true]"
    x, d_out = problem(expression, 33, b=2, dtype=torch.bfloat16)
    lengths = torch.tensor([0, 20])
    is_masked = torch.arange(33) >= lengths[:, None]
    x |= {name: with_nan(x[name], is_masked) for name in "qkv"}
    out, gradients = check(expression, x, with_nan(d_out, is_masked), lengths=lengths)
    assert (out[is_masked] == 0).all()
    assert all((gradients[name][is_masked] == 0).all() for name in "qkv")


def test_masked_keys_may_contain_nan_and_queries_may_have_no_visible_key():
    expression = "softmax[window=9,sink=true]"
    x, d_out = problem(expression, 33, b=2)
    key_mask = torch.arange(33)[None] % 5 > 1
    key_mask = key_mask & torch.tensor([[True], [False]])
    x |= {name: with_nan(x[name], ~key_mask) for name in ("k", "v")}
    out, gradients = check(expression, x, d_out, key_mask=key_mask)
    assert (out[1] == 0).all()
    assert (gradients["q"][1] == 0).all()


def test_a_nan_in_a_key_reaches_its_own_output_and_later_ones():
    x, d_out = problem("softmax[softcap=2]", 20)
    x["k"][:, 7, 0, 3] = torch.nan
    out, _ = run_kernels("softmax[softcap=2]", x, d_out)
    assert torch.isnan(out[:, 7:]).all()
    assert torch.isfinite(out[:, :7]).all()


@pytest.mark.parametrize(
    ("options", "t"), [("window=9", 50), ("causal=false,softcap=3", 80), ("sink=true", 50)]
)
def test_queries_attend_to_their_own_segment_only(options, t):
    """Some tiles are within one segment, and some are not."""
    expression = f"softmax[{options}]"
    ids = torch.tensor([[5] * 37 + [1] * 8 + [9] * 35, [3] * 80])
    check(expression, *problem(expression, t, 80, b=2), segment_ids=ids)


def test_duplicate_and_zero_keys():
    x, d_out = problem(EVERYTHING, 33)
    x["k"][:, 5:25] = x["k"][:, 5:6]
    x["k"][:, 28:] = 0
    check(EVERYTHING, x, d_out)


@pytest.mark.parametrize("cap", [0.01, 3000])
def test_a_soft_cap_far_above_or_below_the_scores(cap):
    expression = f"softmax[softcap={cap}]"
    x, d_out = problem(expression, 20)
    check(expression, {**x, "q": 3 * x["q"]}, d_out)


def test_a_sink_that_takes_nearly_all_of_the_weight_or_none():
    x, d_out = problem("softmax[sink=true]", 20, h=2)
    x["sink"] = torch.tensor([-200.0, 20.0])
    check("softmax[sink=true]", x, d_out)


def test_inputs_of_any_strides():
    x, _ = problem(EVERYTHING, 17, b=2, h=2, n=2)
    apart = {name: torch.stack((a, a), dim=-1)[..., 0] for name, a in x.items()}
    apart["bias"] = x["bias"].mT.contiguous().mT
    check(EVERYTHING, apart, torch.randn(17, 1, 8)[None].expand(2, 17, 2, 8))


def test_any_order_of_programs_gives_the_same_bits():
    x, d_out = problem(EVERYTHING, 33, b=2, h=2, shared="b")
    first, second = (run_kernels(EVERYTHING, x, d_out, seed=seed) for seed in (1, 2))
    assert torch.equal(first[0], second[0])
    for name, gradient in first[1].items():
        assert torch.equal(gradient, second[1][name])


def test_equal_keys_in_a_precise_kernel(monkeypatch):
    """Only the sums of the rows of dS remain in the gradient of a query."""
    monkeypatch.setenv(VARIABLE, "1")
    x, d_out = problem("softmax[softcap=20]", 33, dtype=torch.bfloat16)
    x["k"] = (0.02 * x["k"] + 1).bfloat16()
    check("softmax[softcap=20]", x, d_out, bound=2e-3)


def test_shipped_tiles_compute_the_same():
    for dtype in (torch.float32, torch.bfloat16):
        check(EVERYTHING, *problem(EVERYTHING, 33, dtype=dtype), tiles={})


def with_nan(array, is_masked):
    """The array with NaN at masked tokens (b, t)."""
    return array.masked_fill(is_masked[:, :, None, None], torch.nan)


# --------------------------------------------------------------------------------- refusals


def refusal(expression, *, verb="vjp", d=64, e=64, t=8, dtype="bfloat16"):
    leaf = pa.parse(expression)
    sizes = {"b": 1, "t": t, "s": 8, "h": 2, "n": 1, "d": d, "e": e}
    shapes = tuple((name, p.shape(sizes)) for name, p in leaf.inputs.items())
    return Triton().refusal(leaf, Request(verb, "torch", "cpu", dtype, shapes, frozenset()))


def test_supported_calls_are_accepted():
    for size in ({}, {"d": 68}, {"d": 256, "e": 512}, {"t": 3}, {"verb": "forward"}):
        for expression in (EVERYTHING, "softmax[window=3]", "softmax[sink=true,causal=false]"):
            assert refusal(expression, **size) is None


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
        (
            "softmax[window=3]",
            {"e": 260, "dtype": "float16"},
            "values of width 256 at most; found 260",
        ),
        ("softmax[window=3]", {"t": 0}, "empty"),
    ],
)
def test_calls_without_a_kernel_are_declined_with_the_reason(expression, changes, reason):
    assert reason in refusal(expression, **changes)


@pytest.mark.parametrize("lucid", ["{}", "lucid({})", "row_normalized({})"])
def test_a_plan_reads_by_these_kernels_where_an_option_is_used(lucid):
    q, k, v = torch.randn(3, 1, 20, 2, 8)
    for expression, backend in (("softmax[window=3]", "triton"), ("softmax", "torch")):
        mechanism = pa.parse(lucid.format(expression))
        plan = mechanism.explain(q, k, v, backend=("triton", "torch"))
        assert plan.backends["lucid" in lucid] == backend
