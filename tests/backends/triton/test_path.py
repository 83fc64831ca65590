"""PaTH's Triton kernels against the definition, in the interpreter."""

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn.backend import ArraySpec, Request
from precondattn.frame import full_frame
from precondattn.kernel_backend.precise import VARIABLE
from precondattn_conformance.tolerance import error
from precondattn_triton.configurations import Configuration
from precondattn_triton.path.groups import Level, groups
from precondattn_triton.path.leaf import PathKernels
from tests.backends.triton.tiles import SMALL, tiles_as_given

BOUND = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
INPUTS = ("q", "k", "v", "w", "beta")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of two chunks, so that short sequences have several."""
    monkeypatch.setattr("precondattn_triton.path.blocks.SMALLEST", 32)


def problem(t, s=None, *, b=1, h=1, n=1, d=16, e=8, dtype=torch.float32):
    """Inputs with directions of length 1 and β in [0, 2], and a cotangent."""
    s = s or t
    torch.manual_seed(t)
    w = torch.nn.functional.normalize(torch.randn(b, s, n, d), dim=-1)
    x = {"q": torch.randn(b, t, h, d), "k": torch.randn(b, s, n, d), "v": torch.randn(b, s, n, e)}
    x |= {"w": w, "beta": 2 * torch.rand(b, s, n)}
    return {name: a.to(dtype) for name, a in x.items()}, torch.randn(b, t, h, e).to(dtype)


class PathRun:
    """The kernels' results of a call: output, and gradients by input."""

    def __init__(self, x, d_out, *, window=None, seed=0, tiles=SMALL, **masks):
        leaf = pa.Path(window=window)
        frame = full_frame(x["q"].shape[1], x["k"].shape[1], x["q"], **masks)
        path = PathKernels()
        with torch.no_grad(), tiles_as_given(seed, tiles):
            self.out, residuals = path.forward(leaf, x, frame)
            self.gradients = path.backward(leaf, x, frame, self.out, residuals, d_out)
        specs = {name: ArraySpec(tuple(a.shape), dtype_name(a)) for name, a in x.items()}
        shapes = [ArraySpec(tuple(r.shape), dtype_name(r)) for r in residuals]
        assert shapes == list(path.residual_shapes(leaf, specs))


def dtype_name(array):
    return str(array.dtype).removeprefix("torch.")


def wide(array):
    return array.double().numpy()


def expected(x, d_out, *, window=None, **masks):
    """Output and gradients of the definition, in float64."""
    with pa.use_backend("reference"):
        out, pullback = pa.Path(window=window).vjp(
            **{name: a.double() for name, a in x.items()}, **masks
        )
        return out, pullback(d_out.double())


def check(x, d_out, *, bound=None, **options):
    """The kernels agree with the definition, and write to none of the inputs."""
    bound = bound or BOUND[x["v"].dtype]
    before = {name: a.clone() for name, a in x.items()}
    result = PathRun(x, d_out, **options)
    call = {name: a for name, a in options.items() if name not in ("tiles", "seed")}
    out, gradients = expected(x, d_out, **call)
    assert result.out.dtype == x["v"].dtype
    assert error(wide(result.out), wide(out)) < bound
    for name in INPUTS:
        gradient = result.gradients[name]
        assert gradient.dtype == x[name].dtype
        assert gradient.shape == x[name].shape
        assert error(wide(gradient), wide(gradients[name])) < 2 * bound, name
        torch.testing.assert_close(x[name], before[name], rtol=0, atol=0, equal_nan=True)
    return result


@pytest.mark.parametrize(
    ("t", "h", "n", "d", "e", "dtype"),
    [
        (1, 1, 1, 8, 16, torch.float32),
        (15, 1, 1, 12, 8, torch.float32),
        (16, 2, 2, 16, 20, torch.bfloat16),
        (17, 2, 1, 20, 12, torch.float32),
        (20, 1, 1, 16, 16, torch.float16),
        (33, 1, 1, 8, 8, torch.bfloat16),
        (50, 2, 1, 16, 8, torch.float32),  # Queries of two blocks, and of one key head.
    ],
)
def test_output_and_gradients_of_every_size_and_dtype(t, h, n, d, e, dtype):
    x, d_out = problem(t, h=h, n=n, d=d, e=e, dtype=dtype)
    check(x, d_out)


@pytest.mark.parametrize("t", [3, 24])
def test_fewer_queries_than_keys_are_the_last_ones(t):
    """Tiles of queries begin within a chunk."""
    check(*problem(t, 35))


@pytest.mark.parametrize("widest", [128, 8])
def test_groups_of_queries_add_to_the_same_gradients(monkeypatch, widest):
    """One block at a time; or, if keys are too wide for blocks, one chunk at a time."""
    monkeypatch.setattr("precondattn_triton.path.blocks.WIDEST", widest)
    monkeypatch.setattr("precondattn_triton.path.groups.BUDGET", 1)
    check(*problem(40, 72))


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 640])
@pytest.mark.parametrize("past", [0, 1, 40])
@pytest.mark.parametrize("level", [Level(16, 4), Level(64, 100)])
def test_groups_have_every_query_once_and_fit_the_budget(monkeypatch, level, past, tokens):
    monkeypatch.setattr("precondattn_triton.path.groups.BUDGET", 3 * 2**16)
    found = groups(level, past, past + tokens, row_bytes=64)
    ends = [group.end for group in found]
    assert [group.start for group in found[1:]] == ends[:-1]
    assert found[0].start <= past < found[0].end
    assert ends[-1] == past + tokens
    for group in found:
        is_smallest = group.end - group.start <= level.length * min(level.per_parent, 4)
        assert 64 * group.stored <= 3 * 2**16 or is_smallest


def test_tiles_may_be_larger_and_smaller_than_chunks():
    x, d_out = problem(37, 40)
    for rows, chunk in ((32, 16), (16, 32)):
        tiles = dict.fromkeys((name for name in SMALL if "path" in name), Configuration(rows, 16))
        check(x, d_out, tiles={**tiles, "path_chunks": Configuration(chunk, 16)})


@pytest.mark.parametrize("window", [2, 20])
def test_a_window_gives_the_definition(window):
    check(*problem(33, 40), window=window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_may_contain_nan(dtype):
    x, d_out = problem(33, b=2, dtype=dtype)
    lengths = torch.tensor([0, 20])
    is_masked = torch.arange(33) >= lengths[:, None]
    x = {name: with_nan(a, is_masked) for name, a in x.items()}
    result = check(x, with_nan(d_out, is_masked), lengths=lengths)
    assert (result.out[is_masked] == 0).all()
    assert all((gradient[is_masked] == 0).all() for gradient in result.gradients.values())


def test_masked_keys_may_contain_nan_and_do_not_reflect():
    x, d_out = problem(33, b=2)
    key_mask = torch.arange(33) % 5 > 1  # A query before the third has no visible key.
    key_mask = key_mask[None] & torch.tensor([[True], [False]])
    x |= {name: with_nan(x[name], ~key_mask) for name in INPUTS[1:]}
    result = check(x, d_out, key_mask=key_mask)
    assert (result.out[1] == 0).all()
    assert (result.gradients["q"][1] == 0).all()


def test_queries_attend_to_their_own_segment_only():
    x, d_out = problem(50)
    ids = torch.tensor([[2**40] * 10 + [1] * 8 + [2**40 + 2**32] * 32])
    check(x, d_out, segment_ids=ids)


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_extreme_strengths_and_directions(beta):
    """No reflection, projections and reflections (β = 0, 1, 2); equal and zero directions."""
    x, d_out = problem(40)
    x["beta"] = torch.full_like(x["beta"], beta)
    x["w"][:, 10:20] = x["w"][:, 10:11]
    x["w"][:, 20:25] = 0
    x["w"][:, 25:] = torch.nn.functional.normalize(x["w"][:, 25:] * 0.1 + x["w"][:, 9:10], dim=-1)
    x["k"][:, 5:30] = x["k"][:, 5:6]
    check(x, d_out)


def test_with_zero_strength_path_is_softmax():
    x, d_out = problem(40)
    x["beta"].zero_()
    with pa.use_backend("reference"):
        softmax = pa.Softmax()(x["q"], x["k"], x["v"])
    assert error(wide(PathRun(x, d_out).out), wide(softmax)) < 1e-6


@pytest.mark.parametrize("size", [1e-4, 30.0])
def test_logits_of_any_size(size):
    x, d_out = problem(33)
    x["q"] *= size
    # Float32 rounds logits of that size to 1e-5, and so their exponentials.
    check(x, d_out, bound=2e-4 if size > 1 else None)


def test_correlated_directions_cost_no_accuracy():
    """The Neumann series by repeated doubling would lose digits."""
    torch.manual_seed(0)
    w = torch.nn.functional.normalize(torch.randn(1, 32) + 0.1 * torch.randn(32, 32), dim=-1)
    x, d_out = problem(32, d=32)
    x["w"], x["beta"] = w[None, :, None], torch.ones(1, 32, 1)
    chunks = {**SMALL, "path_chunks": Configuration(32, 16)}
    check(x, d_out, tiles=chunks)


@pytest.mark.thorough
def test_inputs_of_any_strides():
    x, d_out = problem(20, b=2, h=2, n=2, d=16)
    apart = {
        name: torch.stack((a, a), dim=-1)[..., 0].transpose(0, 1).contiguous().transpose(0, 1)
        for name, a in x.items()
    }
    first = check(apart, d_out[:1, :1].expand(2, 20, 2, 8))
    contiguous = {name: a.contiguous() for name, a in x.items()}
    again = PathRun(contiguous, d_out[:1, :1].expand_as(d_out))
    assert torch.equal(first.out, again.out)


def test_any_order_of_programs_gives_the_same_bits():
    x, d_out = problem(33, h=2)
    first, second = (PathRun(x, d_out, seed=seed) for seed in (1, 2))
    assert torch.equal(first.out, second.out)
    for name, gradient in first.gradients.items():
        assert torch.equal(gradient, second.gradients[name])


def test_shipped_tiles_compute_the_same():
    x, d_out = problem(35)
    for dtype in (torch.float32, torch.bfloat16):
        x = {name: a.to(dtype) for name, a in x.items()}
        check(x, d_out.to(dtype), tiles={})


def with_nan(array, is_masked):
    """The array with NaN at masked tokens (b, t)."""
    return array.masked_fill(
        is_masked.reshape(*is_masked.shape, *[1] * (array.ndim - 2)), torch.nan
    )


# --------------------------------------------------------------------------------- refusals


def refusal(leaf, *, verb="vjp", d=64, e=64, t=8):
    shapes = {"q": (1, t, 2, d), "k": (1, 8, 1, d), "v": (1, 8, 1, e)}
    shapes |= {"w": (1, 8, 1, d), "beta": (1, 8, 1)}
    request = Request(verb, "torch", "cuda", "bfloat16", tuple(shapes.items()), frozenset())
    return PathKernels().refuses(leaf.program.leaves[0], request)


def test_supported_calls_are_accepted():
    for size in ({}, {"d": 68}, {"d": 256, "e": 512}, {"t": 3}, {"verb": "forward"}):
        assert refusal(pa.Path(window=3, flush=7), **size) is None


@pytest.mark.parametrize(
    ("base", "changes", "reason"),
    [
        (pa.Path(bias=True), {}, "a bias"),
        (pa.Path(forget="scaled"), {}, "a forget gate"),
        (pa.Laser(pa.Path()), {}, "not for LASER"),
        (pa.Path(), {"d": 264}, "keys of width 256 at most; found 264"),
        (pa.Path(), {"e": 520}, "values of width 512 at most; found 520"),
        (pa.Path(), {"t": 9}, "more queries than keys"),
        (pa.Path(), {"t": 0}, "empty"),
    ],
)
def test_calls_without_a_kernel_are_declined_with_the_reason(base, changes, reason):
    assert reason in refusal(base, **changes)


def test_in_a_precise_kernel_equal_keys_give_queries_a_gradient_of_zero(monkeypatch):
    """Without reflections, dq = Σ dS k of one k, and the rows of dS sum to 0."""
    monkeypatch.setenv(VARIABLE, "1")
    x, d_out = problem(40, d=16, e=16, dtype=torch.bfloat16)
    x |= {"k": 16 * x["k"][:, :1].expand_as(x["k"]), "beta": torch.zeros_like(x["beta"])}
    d_q = PathRun(x, d_out).gradients["q"]
    assert d_q.abs().max() < 1e-4 * x["k"].abs().max()
