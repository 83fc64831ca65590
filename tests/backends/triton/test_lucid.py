"""LUCID's Triton kernels against the definition, in the interpreter."""

import itertools

import pytest

pytest.importorskip("triton")

import torch

import precondattn as pa
from precondattn.frame import Frame, full_frame
from precondattn_conformance.case import Case
from precondattn_conformance.inputs import CallLayout
from precondattn_conformance.runner import run_case
from precondattn_triton.configurations import Configuration, configuration
from precondattn_triton.lucid import matrix as lucid_matrix
from precondattn_triton.lucid.matrix import LucidMatrix
from precondattn_triton.lucid.plan import plan_of, super_block_of, update_steps
from precondattn_triton.lucid.solve import LucidSolveKernels
from tests.backends.triton.tiles import error, small_tiles

BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 8e-3}


def problem(
    t,
    d=8,
    e=16,
    n=2,
    b=2,
    dtype=torch.float32,
    keys="clustered",
    lengths=None,
    segments=False,
    spread=1.0,
    **options,
):
    """A leaf, its inputs, a cotangent, a frame, and which tokens are valid."""
    torch.manual_seed(t)
    leaf = pa.LucidSolve(**options)
    k = 0.3 * torch.randn(b, t, n, d) + torch.randn(b, 1, n, d)
    if keys == "equal":
        k = k[:, :1].expand(b, t, n, d).clone()
    if keys == "zero":
        k[:, ::3] = 0
    if options.get("normalize") == "given":
        k = k / k.square().mean(-1, keepdim=True).sqrt()
    x = {"k": k, "v": torch.randn(b, t, n, e) * spread ** torch.randn(e)}
    if leaf.beta:
        x["lucid_beta"] = 2 * torch.rand(b, t, n)
        x["lucid_beta"][:, ::4] = 0
    x = {name: array.to(dtype) for name, array in x.items()}
    position = torch.arange(t)[None]
    valid = None if lengths is None else position < torch.tensor(lengths)[:, None]
    segment = (position // 7).expand(b, t) if segments else None
    frame = Frame(position, position, valid, valid, segment, segment)
    return leaf, x, torch.randn(b, t, n, e).to(dtype), frame


def only_valid(array, frame, filler):
    if frame.k_valid is None:
        return array
    valid = frame.k_valid.reshape(*frame.k_valid.shape, *[1] * (array.ndim - 2))
    return array.masked_fill(~valid, filler)


def check(leaf, x, d_y, frame, bound, **tiles):
    """Output and gradients against the definition in float64, whatever the padding contains."""
    wide = {name: array.double() for name, array in x.items()}
    y = only_valid(leaf.forward(wide, frame)[0], frame, 0)
    expected = leaf.backward(wide, frame, y, (), only_valid(d_y.double(), frame, 0))
    given = {name: only_valid(array, frame, torch.nan) for name, array in x.items()}
    before = {name: array.clone() for name, array in given.items()}
    kernels = LucidSolveKernels()
    with small_tiles(**tiles):
        result, residuals = kernels.forward(leaf, given, frame)
        d_y = only_valid(d_y, frame, torch.nan)
        gradients = kernels.backward(leaf, given, frame, result, residuals, d_y)
    shapes = kernels.residual_shapes(leaf, {"v": (tuple(x["v"].shape), str(x["v"].dtype)[6:])})
    assert [(tuple(r.shape), str(r.dtype)[6:]) for r in residuals] == [tuple(s) for s in shapes]
    assert result.dtype == x["v"].dtype
    assert error(result, y) < bound
    for name, gradient in expected.items():
        assert gradients[name].dtype == x[name].dtype
        assert error(gradients[name], only_valid(gradient, frame, 0)) < 4 * bound, name
        torch.testing.assert_close(given[name], before[name], equal_nan=True, rtol=0, atol=0)


@pytest.mark.thorough(but=("33-dtype0", "33-dtype1"))
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("t", [15, 33, 65])
def test_every_dtype_across_blocks_and_super_blocks(t, dtype):
    check(*problem(t, d=12, e=20, dtype=dtype, beta=True), BOUNDS[dtype])


@pytest.mark.parametrize("t", [16, 17, 32, 48])
def test_lengths_around_the_edges_of_blocks(t):
    check(*problem(t, b=1, n=1), 2e-5)


def test_small_cotangents_beside_large_ones_keep_their_digits():
    """dv of a token depends on its own cotangent and on later ones, which are small here."""
    leaf, x, d_y, frame = problem(34, b=1, dtype=torch.float16)
    d_y[:, :3] *= 4000
    d_y[:, 3:] *= 0.002
    wide = {name: array.double() for name, array in x.items()}
    y = leaf.forward(wide, frame)[0]
    expected = leaf.backward(wide, frame, y, (), d_y.double())["v"][:, 3:]
    with small_tiles():
        y, residuals = LucidSolveKernels().forward(leaf, x, frame)
        found = LucidSolveKernels().backward(leaf, x, frame, y, residuals, d_y)["v"][:, 3:].double()
    assert (found - expected).abs().max() < 5e-3 * expected.abs().max()


def test_for_one_token_y_is_its_value():
    leaf, x, d_y, frame = problem(1)
    with small_tiles():
        y, _ = LucidSolveKernels().forward(leaf, x, frame)
        result = LucidSolveKernels().backward(leaf, x, frame, y, (), d_y)
    torch.testing.assert_close(y, x["v"])
    torch.testing.assert_close(result["v"], d_y)
    assert not result["k"].any()


@pytest.mark.parametrize("keys", ["equal", "zero"])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_keys_that_coincide_or_are_zero(keys, eps):
    check(*problem(50, b=1, keys=keys, eps=eps), 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(40, 13), (40, 0)])
def test_padding_has_no_effect(dtype, lengths):
    check(*problem(40, dtype=dtype, lengths=lengths, beta=True), BOUNDS[dtype])


def test_segments_are_independent():
    check(*problem(50, segments=True), 2e-5)


@pytest.mark.parametrize(("d", "e"), [(68, 8), (16, 136), (40, 260)])
def test_widths_that_are_no_powers_of_two(d, e):
    check(*problem(18, d=d, e=e, b=1, n=1, dtype=torch.bfloat16), 2e-2)


def test_keys_that_are_normalised_already():
    check(*problem(34, dtype=torch.bfloat16, normalize="given"), 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_of_very_different_sizes(dtype):
    """Each channel is as accurate as alone, although the largest float16 is 65504."""
    leaf, x, _, frame = problem(34, b=1, n=1, dtype=dtype, spread=1e4)
    expected = leaf.forward({name: a.double() for name, a in x.items()}, frame)[0]
    with small_tiles():
        result, _ = LucidSolveKernels().forward(leaf, x, frame)
    for channel in range(expected.shape[3]):
        assert error(result[..., channel], expected[..., channel]) < BOUNDS[dtype]


def test_right_sides_that_grow_from_one_super_block_to_the_next():
    """A super-block is divided by its largest right side, after those before it are subtracted."""
    leaf, x, d_y, frame = problem(98, e=8, b=1, n=1, dtype=torch.bfloat16)
    token = torch.arange(98)[None, :, None, None]
    x["v"] = torch.where(token < 32, 1e4, 1e-4).bfloat16() * x["v"]
    d_y = torch.where(token < 66, 1e-4, 1e4).bfloat16() * d_y
    check(leaf, x, d_y, frame, BOUNDS[torch.bfloat16])


def test_large_gradients_in_float16():
    """Products of dv and y overflow float16; the gradient of the keys does not."""
    leaf, x, d_y, frame = problem(34, e=64, b=1, n=1, dtype=torch.float16)
    x = {**x, "v": 30 * x["v"]}
    check(leaf, x, 50 * d_y, frame, BOUNDS[torch.float16])


@pytest.mark.thorough
def test_the_gradient_of_wide_clustered_keys_in_bfloat16():
    """The norm's gradient cancels most of it: factors of 8 bits would leave an error of 0.015."""
    layout = CallLayout("wide", b=1, t=40, s=40, h=2, n=2, d=64, e=64)
    case = Case("gradients", "lucid_solve[beta=true]", "torch", "bfloat16", layout, "clustered")
    with small_tiles():
        outcome = run_case(case, ("triton",))
    assert outcome.status == "passed", outcome.text
    assert outcome.measured.error < 8e-3


def test_tiles_of_unequal_sizes():
    tiles = {"lucid_update": Configuration(32, 16), "lucid_gradient": Configuration(16, 32)}
    check(*problem(70, b=1, n=1), 2e-5, **tiles)
    tiles = {"lucid_inverse": Configuration(16, 128), "lucid_gradient": Configuration(32, 16)}
    check(*problem(70, b=1, n=1), 2e-5, **tiles)


@pytest.mark.parametrize("t", [33, 130])
def test_shipped_tiles_compute_the_same(t):
    """The diagonal tiles consist of smaller blocks."""
    tiles = {"lucid_inverse": Configuration(64, 128), "lucid_update": Configuration(64, 32)}
    check(*problem(t, b=1, n=1, beta=True), 2e-5, **tiles)


@pytest.mark.parametrize(
    ("inverse", "update"),
    [((64, 128), (32, 16)), ((16, 64), (64, 32)), ((32, 64), (16, 64)), ((64, 64), (128, 64))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_segments_that_begin_within_tiles_of_unequal_sizes(inverse, update, dtype):
    """`substitute` reads no part of the matrix that `update` has not stored."""
    tiles = {
        "lucid_inverse": Configuration(*inverse),
        "lucid_update": Configuration(*update),
        "lucid_gradient": Configuration(16, 16),
    }
    leaf, x, d_y, frame = problem(150, b=1, n=1, dtype=dtype, beta=True)
    ids = torch.searchsorted(torch.tensor([5, 37, 70, 71, 110]), torch.arange(150), right=True)
    frame = Frame(frame.q_position, frame.k_position, None, None, ids[None], ids[None])
    check(leaf, x, d_y, frame, BOUNDS[dtype], **tiles)


@pytest.mark.parametrize(
    ("processors", "parts"), [(1, [0, 1, 1, 1]), (6, [0, 1, 2, 4]), (100, [0, 2, 2, 4])]
)
def test_several_programs_may_share_the_columns_of_a_tile(monkeypatch, processors, parts):
    monkeypatch.setattr(lucid_matrix, "processors", lambda _: processors)
    leaf, x, d_y, frame = problem(100, b=1, n=1, dtype=torch.bfloat16, beta=True)
    with small_tiles():
        matrix = LucidMatrix(leaf, x, frame, backward=False)
    steps = update_steps(matrix.plan.tokens, matrix.plan.super_block, backward=False)
    assert [matrix._parts(step)[0] for step in steps] == parts
    check(leaf, x, d_y, frame, BOUNDS[torch.bfloat16])


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param("clustered", torch.bfloat16, marks=pytest.mark.slow),
        ("equal", torch.bfloat16),
        ("zero", torch.float16),
        ("zero", torch.float32),
        ("given", torch.bfloat16),
        ("padding", torch.bfloat16),
        ("sizes", torch.bfloat16),
        ("opposite", torch.bfloat16),
        ("parts", torch.bfloat16),
        ("packed", torch.float16),
        pytest.param("packed", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_sums_of_keys_over_later_super_blocks(monkeypatch, case, dtype):
    """`update` sums them in launches of a group of super-blocks, and in one within a group.

    Equal keys hide faults of the sums: the norm takes most of the gradient away. Zeros show them.
    """
    monkeypatch.setattr(lucid_matrix, "processors", lambda _: 6 if case == "parts" else 1)
    monkeypatch.setattr(lucid_matrix, "TOKENS_OF_A_PART", 16)
    t, d, e, n, b, options = 67, 8, 16, 1, 1, {}
    if case in ("clustered", "parts"):
        t = 197 if case == "clustered" else 100
    if case == "padding":
        options = {"lengths": (44,)}
    if case == "given":
        options = {"normalize": "given"}
    if case == "zero":
        d, e, n = 12, 20, 2
    if case == "packed":
        b = 2
    keys = case if case in ("equal", "zero") else "clustered"
    if case in ("packed", "parts"):
        keys = "zero"
    leaf, x, d_y, frame = problem(t, d, e, n, b, dtype, keys, **options)
    size = torch.where(torch.arange(e) % 2 == 0, 1e-6, 1e6)
    if case == "sizes":
        x["v"] *= size.to(dtype)
        d_y *= torch.where(torch.arange(t) < 40, 1e-5, 1e5)[:, None, None].to(dtype)
    if case == "opposite":
        x["v"] *= size.to(dtype)
        d_y *= (1 / size).to(dtype)
    if case == "packed":
        # Segments that end within a super-block of 32 tokens, and that reach the next one.
        ends = torch.tensor([[5, 50], [31, 40]])
        ids = torch.searchsorted(ends, torch.arange(t).expand(2, t).contiguous(), right=True)
        frame = Frame(frame.q_position, frame.k_position, None, None, ids, ids)
    with small_tiles():
        matrix = LucidMatrix(leaf, x, frame, backward=True)
        y = LucidSolveKernels().forward(leaf, x, frame)[0]
        y = torch.nn.functional.pad(y, (0, 3), value=torch.nan)[..., :e]
        sums = matrix.solve(d_y, torch.empty_like(d_y), None, y).keys
    assert sums is not None
    assert sums[:, :, :32].isfinite().all()
    assert sums.shape[0] == (2 if case == "parts" else 1)
    assert matrix.plan.super_block == (48 if case == "clustered" else 32)
    check(leaf, x, d_y, frame, BOUNDS[dtype])


@pytest.mark.parametrize(
    ("d", "e", "dtype", "options", "is_supported"),
    [
        (12, 20, torch.float32, {}, True),
        (136, 16, torch.float16, {}, True),
        (136, 16, torch.float16, {"segments": True}, False),
        (136, 16, torch.float32, {}, False),
        (16, 136, torch.bfloat16, {}, False),
    ],
)
def test_calls_whose_update_sums_keys(d, e, dtype, options, is_supported):
    leaf, x, _, frame = problem(40, d, e, n=1, b=1, dtype=dtype, **options)
    with small_tiles():
        matrix = LucidMatrix(leaf, x, frame, backward=True)
    assert matrix._supports_key_sums(parts=1) == is_supported
    assert not matrix._supports_key_sums(parts=2)


@pytest.mark.thorough(but=("1-dtype0", "1-dtype1"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 64])
def test_programs_of_any_number_of_channels(dtype, heads):
    """With many heads, a program solves for more channels."""
    leaf, x, d_y, frame = problem(40, d=8, e=72, b=1, n=heads, dtype=dtype, beta=True)
    with small_tiles():
        plan = plan_of(leaf, x["k"], x["v"])
    assert plan.solver == (64 if heads == 64 else 32)
    check(leaf, x, d_y, frame, BOUNDS[dtype])


def test_results_that_shrink_from_one_super_block_to_the_next_keep_their_digits():
    """Segments have values of very different sizes, in one super-block and in several."""
    leaf, x, d_y, frame = problem(98, e=8, b=1, n=1, dtype=torch.bfloat16)
    token = torch.arange(98)
    ids = torch.searchsorted(torch.tensor([20, 32, 64]), token, right=True)
    frame = Frame(frame.q_position, frame.k_position, None, None, ids[None], ids[None])
    size = torch.tensor([1e6, 1e-2, 1e-12, 1e12])[ids][None, :, None, None]
    x["v"] = (size * x["v"]).bfloat16()
    d_y = (size.flip(1) * d_y).bfloat16()
    wide = {name: a.double() for name, a in x.items()}
    y = leaf.forward(wide, frame)[0]
    d_v = leaf.backward(wide, frame, y, (), d_y.double())["v"]
    with small_tiles():
        found, residuals = LucidSolveKernels().forward(leaf, x, frame)
        gradients = LucidSolveKernels().backward(leaf, x, frame, found, residuals, d_y)
    for segment in range(4):
        of_segment = ids == segment
        for result, expected in ((found, y), (gradients["v"], d_v)):
            expected = expected[:, of_segment]
            scale = expected.abs().max()
            difference = result[:, of_segment].double() - expected
            assert difference.abs().max() < BOUNDS[torch.bfloat16] * scale, segment


@pytest.mark.parametrize(
    ("tokens", "size"),
    [(256, 256), (512, 512), (1024, 1024), (2048, 1024), (4096, 1024), (8192, 1536),
     (16384, 2048), (32768, 3072), (131072, 6144)],
)  # fmt: skip
def test_super_blocks_grow_with_the_square_root_of_the_number_of_tokens(tokens, size):
    assert super_block_of(tokens, 1024, 128) == size


class Launched:
    """A kernel that only notes its launches."""

    def __init__(self, name, launches):
        self.name, self.launches = name, launches

    def __getitem__(self, grid):
        return lambda *_, **__: self.launches.append((self.name, grid))


@pytest.mark.parametrize(
    ("tokens", "updated_rows"),
    [(1024, [1024]), (8192, [4608, 1536, 1536, 3584, 1536, 512]),
     (32768, [6144, 3072, *2 * (9216, 3072, 3072), 8192, 3072, 2048])],
)  # fmt: skip
def test_launches_of_a_solve(monkeypatch, tokens, updated_rows):
    """Two for each super-block, one for the keys and one for all inverses; one for dk.

    The first `update` of a group is for the rows of all its super-blocks, up to three.
    """
    launches, super_blocks = [], len(updated_rows)
    for module, name in (
        (lucid_matrix.lucid_prepare, "normalize_keys"),
        (lucid_matrix.lucid_inverse, "invert_blocks"),
        (lucid_matrix.lucid_substitution, "update"),
        (lucid_matrix.lucid_substitution, "substitute"),
        (lucid_matrix.lucid_gradient, "key_gradient"),
    ):
        monkeypatch.setattr(module, name, Launched(name, launches))
    x = {name: torch.empty(1, tokens, 16, 128, device="meta").bfloat16() for name in ("k", "v")}
    frame = full_frame(tokens, tokens, x["k"])
    y, _ = LucidSolveKernels().forward(pa.LucidSolve(), x, frame)
    forward = launches.copy()
    LucidSolveKernels().backward(pa.LucidSolve(), x, frame, y, (), y)
    names = ["normalize_keys", "invert_blocks", *super_blocks * ("update", "substitute")]
    assert [name for name, _ in forward] == names
    assert [name for name, _ in launches] == [*names, *names, "key_gradient"]
    rows = configuration("lucid_update", 128, half=True).rows
    updates = [grid for name, grid in forward if name == "update"]
    assert [grid[2] for grid in updates] == [1] + (super_blocks - 1) * [2]
    assert [grid[0] * rows for grid in updates] == updated_rows


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_untuned_configurations(dtype):
    half = dtype == torch.bfloat16
    names = ("lucid_inverse", "lucid_update", "lucid_gradient")
    tiles = {name: configuration(name, 64, half) for name in names}
    check(*problem(600, d=64, e=64, b=1, n=1, dtype=dtype), BOUNDS[dtype], **tiles)


def test_any_strides():
    leaf, x, d_y, frame = problem(20, d=8, e=8)
    strided = {name: a.transpose(1, 3).contiguous().transpose(1, 3) for name, a in x.items()}
    with small_tiles():
        expected, _ = LucidSolveKernels().forward(leaf, x, frame)
        y, _ = LucidSolveKernels().forward(leaf, strided, frame)
        wanted = LucidSolveKernels().backward(leaf, x, frame, y, (), d_y)
        shared = d_y[:, :1].expand_as(d_y)
        result = LucidSolveKernels().backward(leaf, strided, frame, y, (), shared)
        again = LucidSolveKernels().backward(leaf, x, frame, y, (), shared.contiguous())
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    assert not torch.equal(result["v"], wanted["v"])
    for name in result:
        torch.testing.assert_close(result[name], again[name], rtol=0, atol=0)


@pytest.mark.thorough
def test_the_order_of_the_programs_does_not_matter():
    leaf, x, d_y, frame = problem(50, beta=True)
    results = []
    for seed in (1, 2):
        with small_tiles(seed):
            y, residuals = LucidSolveKernels().forward(leaf, x, frame)
            result = LucidSolveKernels().backward(leaf, x, frame, y, residuals, d_y)
        results.append((y, *result.values()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def extended(mechanism, x, splits, dtype, backend, valid=None, lengths=None):
    """The outputs after extending an empty cache by the tokens between splits, and the cache."""
    x = {name: array.to(dtype) for name, array in x.items()}
    has_mask = {} if valid is None else {"key_mask": True}
    cache, outs = mechanism.init_cache(**x, capacity=splits[-1] + 3, **has_mask), []
    for low, high in itertools.pairwise((0, *splits)):
        masks = {} if valid is None else {"key_mask": valid[:, low:high]}
        if lengths is not None:
            masks["lengths"] = (lengths - low).clamp(0, high - low)
        new = {name: array[:, low:high] for name, array in x.items()}
        out, cache = mechanism.extend(cache, **new, **masks, backend=backend)
        outs.append(out)
    return torch.cat(outs, dim=1), cache


@pytest.mark.parametrize(
    ("dtype", "splits", "case"),
    [
        (torch.float32, (20, 57), "plain"),
        (torch.bfloat16, (37, 57, 160), "plain"),
        (torch.float16, (16, 50), "masked"),
        (torch.bfloat16, (40, 75), "masked"),
        (torch.float32, (33, 50), "lengths"),
        (torch.bfloat16, (33, 50), "solve"),
    ],
)
def test_many_new_tokens_after_a_cache(dtype, splits, case):
    torch.manual_seed(0)
    t, backend, mechanism = splits[-1], ["triton", "torch"], pa.Lucid()
    widths = {"q": (4, 8), "k": (2, 8), "v": (2, 16)}
    x = {name: torch.randn(2, t, *width) for name, width in widths.items()}
    x["k"] = 0.3 * x["k"] + torch.randn(2, 1, 2, 8)
    masks = {}
    if case == "masked":
        masks["valid"] = torch.rand(2, t) > 0.2
        masks["valid"][1, :20] = False
        for name in ("k", "v"):
            x[name][~masks["valid"]] = torch.nan
    if case == "lengths":
        masks["lengths"] = torch.tensor([50, 21])
    if case == "solve":
        del x["q"]
        x["lucid_beta"] = 2 * torch.rand(2, t, 2)
        backend, mechanism = "triton", pa.LucidSolve(beta=True)
    expected, cache = extended(mechanism, x, splits, torch.float64, "reference", **masks)
    with small_tiles():
        result, found = extended(mechanism, x, splits, dtype, backend, **masks)
    assert error(result, expected) < BOUNDS[dtype]
    for name, buffer in cache.store.items():
        is_written = buffer.isfinite() & (buffer != 0)
        assert error(found.store[name][is_written], buffer[is_written]) < BOUNDS[dtype], name


@pytest.mark.parametrize(
    ("dtype", "splits", "case"),
    [
        (torch.float32, (17, 19, 27), "beta"),
        (torch.bfloat16, (15, 20), "plain"),
        (torch.float16, (21, 28), "masked"),
        (torch.float32, (19, 26, 33), "lengths"),
    ],
)
def test_a_few_new_tokens_at_once(dtype, splits, case):
    torch.manual_seed(0)
    t, mechanism = splits[-1], pa.Lucid(beta=case == "beta")
    group = 3 if dtype == torch.float16 else 1
    widths = {"q": (2 * group, 8), "k": (2, 8), "v": (2, 12)}
    x = {name: torch.randn(2, t, *width) for name, width in widths.items()}
    x["k"] = 0.1 * x["k"] + torch.randn(2, 1, 2, 8)
    x["k"][:, -4:-2] = x["k"][:, :1]
    x["k"][0, -6] = 0
    masks = {}
    if case == "beta":
        x["lucid_beta"] = 2 * torch.rand(2, t, 2)
    if case == "masked":
        masks["valid"] = torch.rand(2, t) > 0.3
        masks["valid"][1, :23] = False  # A query without a key.
        for name in ("k", "v"):
            x[name][~masks["valid"]] = torch.nan
    if case == "lengths":
        masks["lengths"] = torch.tensor([22, 30])  # One gets a part of the tokens, then none.
    expected, cache = extended(mechanism, x, splits, torch.float64, "reference", **masks)
    with small_tiles():
        result, found = extended(mechanism, x, splits, dtype, ["triton", "torch"], **masks)
    assert error(result, expected) < BOUNDS[dtype]
    for name, buffer in cache.store.items():
        is_written = buffer.isfinite() & (buffer != 0)
        assert error(found.store[name][is_written], buffer[is_written]) < BOUNDS[dtype], name


def test_packed_sequences_are_extended_by_batches_of_similar_lengths():
    torch.manual_seed(0)
    x = {name: torch.randn(1, 47, heads, 8) for name, heads in (("q", 2), ("k", 1), ("v", 1))}
    results = []
    for backend in ("triton", "reference"):
        cache = pa.Lucid().init_cache(**x, capacity=70, sequences=3)
        for borders in ([0, 10, 11, 47], [0, 4, 20, 47]):
            named = "reference" if cache.length.sum() == 0 else backend
            named = ["triton", "torch"] if named == "triton" else named
            with small_tiles():
                out, cache = pa.Lucid().extend(cache, **x, cu_seqlens=borders, backend=named)
        results.append((out, *(cache.store[name] for name in sorted(cache.store))))
    for one, other in zip(*results, strict=True):
        assert error(one, other) < 1e-5


@pytest.mark.parametrize("masked_token", [2, 5])
def test_a_step_ignores_masked_keys_including_its_own(masked_token):
    torch.manual_seed(0)
    x = {name: torch.randn(1, 7, heads, 8) for name, heads in (("q", 2), ("k", 1), ("v", 1))}
    for name in ("k", "v"):
        x[name][:, masked_token] = torch.nan
    result = {}
    for backend in ("triton", "reference"):
        cache, outs = pa.Lucid().init_cache(**x, capacity=8, key_mask=True), []
        for t in range(7):
            new = {name: array[:, t : t + 1] for name, array in x.items()}
            is_visible = torch.tensor([[t != masked_token]])
            with small_tiles():
                out, cache = pa.Lucid().extend(cache, **new, key_mask=is_visible, backend=backend)
            outs.append(out)
        result[backend] = torch.cat(outs, dim=1)
    assert error(result["triton"], result["reference"]) < 2e-6


def test_a_nan_in_a_key_reaches_the_next_steps():
    torch.manual_seed(0)
    x = {name: torch.randn(1, 4, heads, 8) for name, heads in (("q", 2), ("k", 1), ("v", 1))}
    x["k"][:, 1, 0, 3] = torch.nan
    cache = pa.Lucid().init_cache(**x, capacity=8)
    for t in range(4):
        new = {name: array[:, t : t + 1] for name, array in x.items()}
        with small_tiles():
            out, cache = pa.Lucid().extend(cache, **new, backend="triton")
        assert torch.isnan(out).all() == torch.isnan(out).any() == (t >= 1)
