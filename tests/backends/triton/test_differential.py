"""Differential attention's Triton kernels against the definition, in the interpreter."""

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn.algebra.group import Group, group_of
from precondattn.backend import ArraySpec, Request
from precondattn.frame import full_frame
from precondattn_conformance.cancellation import sizes_of_terms
from precondattn_conformance.tolerance import error
from precondattn_triton import Triton
from precondattn_triton.configurations import Configuration
from precondattn_triton.softmax.differential import DifferentialKernels
from tests.backends.triton.tiles import SMALL, tiles_as_given

BOUND = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def problem(expression, t, s=None, *, b=1, h=1, n=1, d=16, e=8, dtype=torch.float32):
    """Inputs by the names of the group, and a cotangent."""
    torch.manual_seed(t)
    sizes = {"b": b, "t": t, "s": s or t, "h": h, "n": n, "d": d, "e": e}
    inputs = Group(group_of(expression)).inputs
    x = {name: torch.randn(p.shape(sizes)).to(dtype) for name, p in inputs.items()}
    return x, torch.randn(b, t, h, e).to(dtype)


def dtype_name(array):
    return str(array.dtype).removeprefix("torch.")


def wide(array):
    return array.double().numpy()


def run_kernels(expression, x, d_out, *, seed=0, tiles=SMALL, **masks):
    """Output and gradients by the kernels."""
    group = Group(group_of(expression))
    frame = full_frame(x["q"].shape[1], x["k"].shape[1], x["q"], **masks)
    kernels = DifferentialKernels()
    with torch.no_grad(), tiles_as_given(seed, tiles):
        out, residuals = kernels.forward(group, x, frame)
        gradients = kernels.backward(group, x, frame, out, residuals, d_out)
    specs = {name: ArraySpec(tuple(a.shape), dtype_name(a)) for name, a in x.items()}
    shapes = [ArraySpec(tuple(r.shape), dtype_name(r)) for r in residuals]
    assert shapes == list(kernels.residual_shapes(group, specs))
    return out, gradients


def check(expression, x, d_out, *, seed=0, tiles=SMALL, **masks):
    """The kernels agree with the definition in float64, and write to none of the inputs."""
    before = {name: a.clone() for name, a in x.items()}
    out, gradients = run_kernels(expression, x, d_out, seed=seed, tiles=tiles, **masks)
    mechanism = pa.parse(expression)
    with pa.use_backend("reference"):
        right, pullback = mechanism.vjp(**{name: a.double() for name, a in x.items()}, **masks)
        expected = pullback(d_out.double())
    # The terms of λ's gradient cancel.
    arrays = {name: wide(a) for name, a in x.items()}
    given = {name: mask.numpy() for name, mask in masks.items()}
    terms = sizes_of_terms(mechanism, arrays, wide(d_out), given)
    bound = BOUND[x["v"].dtype]
    assert out.dtype == x["v"].dtype
    assert error(wide(out), wide(right)) < bound
    for name, gradient in expected.items():
        assert gradients[name].dtype == x[name].dtype
        assert gradients[name].shape == x[name].shape
        size = terms.get(name, 0.0)
        assert error(wide(gradients[name]), wide(gradient), size) < 2 * bound, name
        torch.testing.assert_close(x[name], before[name], rtol=0, atol=0, equal_nan=True)
    return out, gradients


@pytest.mark.parametrize(
    ("expression", "t", "h", "n", "d", "e", "dtype"),
    [
        ("differential", 2, 1, 1, 8, 16, torch.float32),
        ("differential[per=head]", 15, 2, 1, 12, 8, torch.float32),
        ("differential[per=token]", 16, 4, 2, 16, 20, torch.bfloat16),
        ("differential[per=token](softmax[causal=false])", 17, 2, 2, 20, 12, torch.float32),
        ("differential(softmax[scale=0.3])", 33, 1, 1, 16, 16, torch.float16),
        ("differential(softmax[causal=false])", 48, 1, 1, 8, 8, torch.bfloat16),
    ],
)
def test_output_and_gradients_of_every_size_and_dtype(expression, t, h, n, d, e, dtype):
    check(expression, *problem(expression, t, h=h, n=n, d=d, e=e, dtype=dtype))


@pytest.mark.parametrize("paired", ["q", "k"])
def test_inputs_of_both_maps_get_the_sum_of_their_gradients(paired):
    expression = f"differential[paired={paired}]"
    check(expression, *problem(expression, 17, h=2))


def test_tiles_of_queries_and_keys_may_differ():
    high, wide = Configuration(32, 16), Configuration(16, 32)
    tiles = {"forward": wide, "query_gradient": high, "key_gradient": high}
    tiles = {**SMALL, **{f"differential_{name}": cut for name, cut in tiles.items()}}
    check("differential", *problem("differential", 70), tiles=tiles)


@pytest.mark.parametrize("causal", ["true", "false"])
@pytest.mark.parametrize("t", [1, 17])
def test_fewer_queries_than_keys_are_the_last_ones(t, causal):
    expression = f"differential(softmax[causal={causal}])"
    check(expression, *problem(expression, t, 40))


@pytest.mark.parametrize("causal", ["true", "false"])
def test_padding_may_contain_nan(causal):
    expression = f"differential[per=token](softmax[causal={causal}])"
    x, d_out = problem(expression, 33, b=2, dtype=torch.bfloat16)
    lengths = torch.tensor([0, 20])
    is_masked = torch.arange(33) >= lengths[:, None]
    x = {name: with_nan(a, is_masked) for name, a in x.items()}
    out, gradients = check(expression, x, with_nan(d_out, is_masked), lengths=lengths)
    assert (out[is_masked] == 0).all()
    assert all((gradient[is_masked] == 0).all() for gradient in gradients.values())


def test_masked_keys_may_contain_nan_and_queries_may_have_no_visible_key():
    x, d_out = problem("differential", 33, b=2)
    key_mask = torch.arange(33)[None] % 5 > 1
    key_mask = key_mask & torch.tensor([[True], [False]])
    x |= {name: with_nan(x[name], ~key_mask) for name in ("k", "k2", "v")}
    out, gradients = check("differential", x, d_out, key_mask=key_mask)
    assert (out[1] == 0).all()
    assert (gradients["q"][1] == 0).all()


def test_a_nan_in_a_key_reaches_its_own_output_and_later_ones():
    x, d_out = problem("differential", 20)
    x["k"][:, 7, 0, 3] = torch.nan
    out, _ = run_kernels("differential", x, d_out)
    assert torch.isnan(out[:, 7:]).all()
    assert torch.isfinite(out[:, :7]).all()


def test_queries_attend_to_their_own_segment_only():
    x, d_out = problem("differential", 35)
    check("differential", x, d_out, segment_ids=torch.tensor([[5] * 10 + [1] * 8 + [9] * 17]))


def test_equal_maps_give_one_map_times_one_minus_lambda():
    x, d_out = problem("differential", 20)
    x |= {"q2": x["q"], "k2": x["k"], "lam": torch.tensor(1.0)}
    out, _ = run_kernels("differential", x, d_out)
    assert (out == 0).all()
    x["lam"] = torch.tensor(0.25)
    with pa.use_backend("reference"):
        softmax = pa.Softmax()(x["q"], x["k"], x["v"])
    assert error(wide(run_kernels("differential", x, d_out)[0]), wide(0.75 * softmax)) < 1e-6


ALL_OPTIONS = "differential[per=token](softmax[window=21,softcap=2,sink=true,distance=slopes])"


@pytest.mark.parametrize(
    ("expression", "t", "s", "dtype"),
    [
        ("differential(softmax[window=9])", 49, 49, torch.float32),
        ("differential(softmax[causal=false,window=17])", 33, 40, torch.float32),
        ("differential(softmax[distance=slopes])", 33, 33, torch.bfloat16),
        ("differential[paired=q](softmax[sink=true,softcap=2])", 20, 20, torch.float32),
        (ALL_OPTIONS, 33, 40, torch.float32),
        (ALL_OPTIONS, 49, 49, torch.float16),
    ],
)
def test_both_maps_have_the_options_of_softmax(expression, t, s, dtype):
    check(expression, *problem(expression, t, s, b=2, h=2, dtype=dtype))


@pytest.mark.parametrize(
    ("e", "dtype"), [(136, torch.float32), (300, torch.float32), (300, torch.bfloat16)]
)
def test_values_of_several_parts(e, dtype):
    expression = "differential[per=token](softmax[distance=slopes,softcap=2])"
    check(expression, *problem(expression, 20, h=2, e=e, dtype=dtype))


def test_duplicate_and_zero_keys():
    x, d_out = problem("differential", 33)
    x["k"][:, 5:25] = x["k"][:, 5:6]
    x["k2"][:, 8:] = 0
    check("differential", x, d_out)


def test_inputs_of_any_strides():
    x, _ = problem("differential[per=token]", 17, b=2, h=2, n=2)
    apart = {
        name: torch.stack((a, a), dim=-1)[..., 0].transpose(0, 1).contiguous().transpose(0, 1)
        for name, a in x.items()
    }
    check("differential[per=token]", apart, torch.randn(17, 1, 8)[None].expand(2, 17, 2, 8))


def test_any_order_of_programs_gives_the_same_bits():
    x, d_out = problem("differential", 33, h=2)
    first, second = (run_kernels("differential", x, d_out, seed=seed) for seed in (1, 2))
    assert torch.equal(first[0], second[0])
    for name, gradient in first[1].items():
        assert torch.equal(gradient, second[1][name])


def test_shipped_tiles_compute_the_same():
    for dtype in (torch.float32, torch.bfloat16):
        check("differential", *problem("differential", 33, dtype=dtype), tiles={})


def with_nan(array, is_masked):
    """The array with NaN at masked tokens (b, t)."""
    return array.masked_fill(
        is_masked.reshape(*is_masked.shape, *[1] * (array.ndim - 2)), torch.nan
    )


# --------------------------------------------------------------------------------- refusals


def refusal(expression, *, verb="vjp", d=64, e=64, t=8, dtype="bfloat16"):
    group = Group(group_of(expression))
    sizes = {"b": 1, "t": t, "s": 8, "h": 2, "n": 1, "d": d, "e": e}
    shapes = tuple((name, p.shape(sizes)) for name, p in group.inputs.items())
    request = Request(verb, "torch", "cpu", dtype, shapes, frozenset())
    return Triton().refusal(group, request)


def test_supported_calls_are_accepted():
    for size in (
        {},
        {"d": 68},
        {"d": 256, "e": 512},
        {"e": 512, "dtype": "float32"},
        {"t": 3},
        {"verb": "forward"},
    ):
        for expression in ("differential", "differential[per=head,paired=q]"):
            assert refusal(expression, **size) is None
    assert refusal(ALL_OPTIONS, d=256, e=512, dtype="float32") is None


@pytest.mark.parametrize(
    ("expression", "changes", "reason"),
    [
        ("differential(softmax[bias=true])", {}, "a bias"),
        ("differential(softmax[forget=scaled])", {}, "a forget gate"),
        ("differential(softmax[distance=buckets])", {}, "buckets"),
        ("differential(laser)", {}, "LASER"),
        ("differential[paired=q/k/v]", {}, "the same values"),
        ("differential", {"verb": "extend_vjp"}, "no step_backward"),
        ("differential", {"d": 264}, "keys of width 256 at most; found 264"),
        ("differential", {"e": 520}, "values of width 512 at most; found 520"),
        ("differential", {"t": 0}, "empty"),
    ],
)
def test_calls_without_a_kernel_are_declined_with_the_reason(expression, changes, reason):
    assert reason in refusal(expression, **changes)


def test_a_plan_runs_the_whole_group_in_one_call():
    q, k, v, q2, k2 = torch.randn(5, 1, 20, 2, 8)
    inputs = {"q": q, "k": k, "v": v, "q2": q2, "k2": k2, "lam": torch.tensor(0.5)}
    plan = pa.Differential().explain(**inputs, backend=("triton", "torch"))
    assert plan.backends == ("triton",)
