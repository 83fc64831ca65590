"""LUCID's Triton kernels in PaTH's metric against the definition, in the interpreter."""

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn.backend import ArraySpec, Request
from precondattn.frame import full_frame
from precondattn.spec.transported import Transported
from precondattn_triton.configurations import Configuration
from precondattn_triton.lucid.solve import LucidSolveKernels
from tests.backends.triton.tiles import SMALL, error, small_tiles, tiles_as_given

BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 8e-3}


def problem(t, d=8, e=16, n=1, b=1, dtype=torch.float32, strength=2.0, **options):
    """A leaf, its inputs, and a cotangent; keys in a cluster, and some equal.

    The cluster and most directions are nearly orthogonal: a reflection along a key would make its
    scores with later keys almost 0, and the test would not depend on them.
    """
    torch.manual_seed(t)
    leaf = pa.LucidSolve(metric=Transported(), **options)
    k = 0.3 * torch.randn(b, t, n, d) + torch.eye(d)[0]
    k[:, 5:9] = k[:, 5:6]
    if leaf.normalize == "given":
        k = k / k.square().mean(-1, keepdim=True).sqrt()
    w = torch.randn(b, t, n, d)
    w[:, 1:, :, 0] *= 0.2
    x = {"k": k, "v": torch.randn(b, t, n, e)}
    x |= {"w": torch.nn.functional.normalize(w, dim=-1), "beta": strength * torch.rand(b, t, n)}
    if leaf.beta:
        x["lucid_beta"] = 2 * torch.rand(b, t, n)
        x["lucid_beta"][:, ::4] = 0
    return leaf, {name: a.to(dtype) for name, a in x.items()}, torch.randn(b, t, n, e).to(dtype)


def expected(leaf, x, d_y, frame):
    """Output and gradients of the definition at valid tokens, in float64."""
    wide = {name: only_valid(a.double(), frame, 0) for name, a in x.items()}
    y = only_valid(leaf.forward(wide, frame)[0], frame, 0)
    gradients = leaf.backward(wide, frame, y, (), only_valid(d_y.double(), frame, 0))
    return y, {name: only_valid(a, frame, 0) for name, a in gradients.items()}


def run_kernels(leaf, x, d_y, frame, tiles=SMALL, seed=0):
    """The kernels' output and gradients, after a check of the residuals' shapes."""
    kernels = LucidSolveKernels()
    with torch.no_grad(), tiles_as_given(seed, tiles):
        y, residuals = kernels.forward(leaf, x, frame)
        gradients = kernels.backward(leaf, x, frame, y, residuals, d_y)
    specs = {"v": ArraySpec(tuple(x["v"].shape), str(x["v"].dtype)[6:])}
    shapes = [ArraySpec(tuple(r.shape), str(r.dtype)[6:]) for r in residuals]
    assert shapes == list(kernels.residual_shapes(leaf, specs))
    return y, gradients


def check(leaf, x, d_y, *, bound=None, tiles=SMALL, seed=0, **masks):
    """The kernels agree with the definition, whatever invalid tokens contain; no input changes."""
    bound = bound or BOUNDS[x["v"].dtype]
    t = x["k"].shape[1]
    frame = full_frame(t, t, x["k"], **masks)
    given = {name: only_valid(a, frame, torch.nan) for name, a in x.items()}
    before = {name: a.clone() for name, a in given.items()}
    y, gradients = run_kernels(leaf, given, only_valid(d_y, frame, torch.nan), frame, tiles, seed)
    wanted, wanted_gradients = expected(leaf, x, d_y, frame)
    assert y.dtype == x["v"].dtype
    assert error(y, wanted) < bound
    assert gradients.keys() == wanted_gradients.keys() == x.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == x[name].dtype
        assert gradient.shape == x[name].shape
        assert error(gradient, wanted_gradients[name]) < 4 * bound, name
        masked = only_valid(torch.zeros_like(gradient), frame, 1).bool()
        assert not gradient[masked].any(), name
        torch.testing.assert_close(given[name], before[name], rtol=0, atol=0, equal_nan=True)
    return y, gradients


def only_valid(array, frame, filler):
    if frame.k_valid is None:
        return array
    valid = frame.k_valid.reshape(*frame.k_valid.shape, *[1] * (array.ndim - 2))
    return array.masked_fill(~valid, filler)


# --------------------------------------------------------------------------------- sizes


@pytest.mark.thorough(but=("33-dtype2", "33-dtype0"))
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("t", [15, 33, 65])
def test_every_dtype_within_chunks_across_borders_and_super_blocks(t, dtype):
    check(*problem(t, d=12, e=20, n=2, dtype=dtype, beta=True), seed=t)


@pytest.mark.parametrize("t", [16, 17, 31, 32, 48, 49, 80, 97, 113])
def test_lengths_around_borders(t):
    """Borders after parts of 16, 32 and 64 tokens; the next part is as long, shorter or empty."""
    check(*problem(t))


def test_for_one_token_y_is_its_value():
    leaf, x, d_y = problem(1)
    y, gradients = check(leaf, x, d_y)
    torch.testing.assert_close(y, x["v"])
    torch.testing.assert_close(gradients["v"], d_y)
    assert not any(gradients[name].any() for name in ("k", "w", "beta"))


@pytest.mark.parametrize(("d", "e"), [(68, 8), (16, 136), (40, 260)])
def test_widths_that_are_no_powers_of_two(d, e):
    check(*problem(34, d=d, e=e, dtype=torch.bfloat16))


@pytest.mark.thorough
def test_tiles_of_scores_may_be_wider_than_a_chunk():
    tiles = {
        **SMALL,
        "lucid_gradient": Configuration(32, 64),
        "lucid_update": Configuration(64, 16),
    }
    check(*problem(150), tiles=tiles)


@pytest.mark.thorough
def test_chunks_of_several_tiles():
    """Inverses begin with the scores within a chunk, and continue across borders."""
    tiles = {**SMALL, "path_chunks": Configuration(32, 16)}
    check(*problem(100), tiles=tiles)
    tiles["lucid_inverse"] = Configuration(16, 128)
    check(*problem(100), tiles=tiles)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shipped_tiles(dtype):
    check(*problem(150, dtype=dtype), tiles={})


# --------------------------------------------------------------------------------- masks


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(70, 13), (33, 0)])
def test_padding_may_contain_nan(dtype, lengths):
    leaf, x, d_y = problem(70, b=2, dtype=dtype, beta=True)
    check(leaf, x, d_y, lengths=torch.tensor(lengths))


def test_masked_keys_may_contain_nan_and_do_not_reflect():
    leaf, x, d_y = problem(50, b=2)
    key_mask = torch.arange(50) % 5 > 1
    check(leaf, x, d_y, key_mask=key_mask[None] & torch.tensor([[True], [False]]))


def test_segments_are_independent():
    ids = torch.tensor([[2**40] * 10 + [1] * 8 + [2**40 + 2**32] * 32 + [7] * 20])
    check(*problem(70), segment_ids=ids)


# --------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("strength", [0.0, 1.0, 2.0])
def test_extreme_strengths_and_directions(strength):
    """No reflection, projections and reflections (β = 0, 1, 2); equal and zero directions."""
    leaf, x, d_y = problem(70)
    x["beta"] = torch.full_like(x["beta"], strength)
    x["w"][:, 10:20] = x["w"][:, 10:11]
    x["w"][:, 20:25] = 0
    x["w"][:, 25:40] = torch.nn.functional.normalize(
        x["w"][:, 25:40] * 0.1 + x["w"][:, 9:10], dim=-1
    )
    check(leaf, x, d_y)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_zero_keys(eps):
    leaf, x, d_y = problem(40, eps=eps)
    x["k"][:, ::3] = 0
    check(leaf, x, d_y)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_equal_keys_turn_values_into_differences_where_nothing_is_reflected(eps):
    leaf, x, d_y = problem(70, eps=eps)
    x["k"] = x["k"][:, :1].expand(1, 70, 1, 8).clone()
    x["beta"].zero_()
    y, _ = check(leaf, x, d_y, bound=1e-4)
    torch.testing.assert_close(y[:, 1:], x["v"][:, 1:] - x["v"][:, :-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_zero_strength_the_metric_is_the_dot_product(dtype):
    leaf, x, d_y = problem(70, dtype=dtype)
    x["beta"].zero_()
    y, gradients = check(leaf, x, d_y)
    plain, plain_gradients = run_kernels(pa.LucidSolve(), dot(x), d_y, full_frame(70, 70, x["k"]))
    assert error(y, plain) < BOUNDS[dtype]
    assert error(gradients["k"], plain_gradients["k"]) < 4 * BOUNDS[dtype]


def dot(x):
    return {name: x[name] for name in ("k", "v")}


def test_keys_that_are_normalised_already():
    check(*problem(50, dtype=torch.bfloat16, normalize="given"))


def test_large_values_and_gradients_in_float16():
    """Products of dv and y overflow float16; the gradients do not."""
    leaf, x, d_y = problem(50, e=64, dtype=torch.float16)
    check(leaf, {**x, "v": 30 * x["v"]}, 50 * d_y)


# --------------------------------------------------------------------------------- arrays


@pytest.mark.thorough
def test_any_strides():
    leaf, x, d_y = problem(40, n=2, b=2, beta=True)
    apart = {name: torch.stack((a, a), -1)[..., 0].mT.contiguous().mT for name, a in x.items()}
    frame = full_frame(40, 40, x["k"])
    wanted, wanted_gradients = run_kernels(leaf, x, d_y[:, :1].expand_as(d_y).contiguous(), frame)
    y, gradients = run_kernels(leaf, apart, d_y[:, :1].expand_as(d_y), frame)
    assert torch.equal(y, wanted)
    assert all(torch.equal(a, wanted_gradients[name]) for name, a in gradients.items())


@pytest.mark.thorough
def test_any_order_of_programs_gives_the_same_bits():
    leaf, x, d_y = problem(80, n=2, beta=True)
    frame = full_frame(80, 80, x["k"])
    (y, first), (again, second) = (run_kernels(leaf, x, d_y, frame, seed=seed) for seed in (1, 2))
    assert torch.equal(y, again)
    assert all(torch.equal(a, second[name]) for name, a in first.items())


@pytest.mark.thorough
def test_lucid_around_path_with_fewer_heads_of_keys():
    """Attention and its preconditioner together, forward and backward, by these kernels alone."""
    mechanism = pa.Lucid(pa.Path())
    _, x, _ = problem(40, n=2, b=2)
    x["q"] = torch.randn(2, 40, 4, 8)
    wide = {name: a.double() for name, a in x.items()}
    d_out = torch.randn(2, 40, 4, 16)
    with pa.use_backend("reference"):
        out, pullback = mechanism.vjp(**wide)
        gradients = pullback(d_out.double())
    with pa.use_backend("triton"), small_tiles():
        again, pull = mechanism.vjp(**x)
        pulled = pull(d_out)
    assert error(again, out) < 2e-5
    assert all(error(pulled[name], gradient) < 8e-5 for name, gradient in gradients.items())


# --------------------------------------------------------------------------------- refusals


def refusal(leaf, d=64, e=64):
    shapes = {"k": (1, 8, 1, d), "v": (1, 8, 1, e), "w": (1, 8, 1, d), "beta": (1, 8, 1)}
    request = Request("vjp", "torch", "cuda", "bfloat16", tuple(shapes.items()), frozenset())
    return LucidSolveKernels().refuses(leaf, request)


def test_supported_calls_are_accepted():
    for size in ({}, {"d": 68}, {"d": 256, "e": 512}):
        assert refusal(pa.LucidSolve(metric=Transported(flush=7), beta=True), **size) is None


@pytest.mark.parametrize(
    ("options", "size", "reason"),
    [
        ({"window": 3}, {}, "no window"),
        ({"normalize": "rows"}, {}, "unit diagonal"),
        ({}, {"d": 257}, "d <= 256"),
        ({}, {"e": 513}, "e <= 512"),
    ],
)
def test_calls_without_a_kernel_are_declined_with_the_reason(options, size, reason):
    assert reason in refusal(pa.LucidSolve(metric=Transported(), **options), **size)
