"""LUCID's CUDA kernels against the definition, in the simulator."""

import numpy as np
import pytest

import precondattn as pa
from precondattn.frame import Frame
from precondattn_cupy.configurations import Configuration, forced
from precondattn_cupy.lucid import solve as lucid_solve
from precondattn_cupy.lucid import step as lucid_step
from precondattn_kernel_tools.cuda_simulator import checked
from tests.backends.cupy.simulated import DTYPES, ORDERS
from tests.kernel_tools.toolchain import needs_simulator

# Thorough: the first test of each kernel compiles it for the simulator, which takes seconds.
pytestmark = [needs_simulator, pytest.mark.thorough]

BOUNDS = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 2e-2}
SMALL = {
    "lucid_inverse": Configuration(16, 32),
    "lucid_update": Configuration(16, 16),
    "lucid_gradient": Configuration(16, 16),
    "lucid_decode": Configuration(16, 16),
}


@pytest.fixture(autouse=True)
def unwritten_is_nan(monkeypatch):
    def empty(like, shape, dtype=None):
        return np.full(shape, np.nan, like.dtype if dtype is None else dtype)

    monkeypatch.setattr(lucid_solve, "empty", empty)
    monkeypatch.setattr(lucid_step, "empty", empty)


def problem(
    t, d=8, e=16, n=2, b=2, keys="clustered", valid=None, segments=False, spread=1.0, **options
):
    """A leaf, its inputs, a cotangent, and a frame."""
    rng = np.random.default_rng(t)
    leaf = pa.LucidSolve(**options)
    k = 0.3 * rng.normal(size=(b, t, n, d)) + rng.normal(size=(b, 1, n, d))
    if keys == "equal":
        k = np.repeat(k[:, :1], t, axis=1)
    if keys == "zero":
        k[:, ::3] = 0
    if options.get("normalize") == "given":
        k /= np.sqrt(np.mean(k**2, axis=-1, keepdims=True))
    x = {"k": k, "v": rng.normal(size=(b, t, n, e)) * spread ** rng.normal(size=e)}
    if leaf.beta:
        x["lucid_beta"] = 2 * rng.random((b, t, n))
        x["lucid_beta"][:, ::4] = 0
    position = np.arange(t)[None]
    segment = None
    if segments:
        # Ids have 64 bits, and every sequence is split at another place.
        segment = np.stack([position[0] // (7 + i) for i in range(b)]) + 2**40
    frame = Frame(position, position, valid, valid, segment, segment)
    return leaf, x, rng.normal(size=(b, t, n, e)), frame


def filled(array, frame, filler):
    if frame.k_valid is None:
        return array
    valid = frame.k_valid.reshape(*frame.k_valid.shape, *[1] * (array.ndim - 2))
    return np.where(valid, array, np.asarray(filler, array.dtype))


def error(result, expected):
    """The largest difference, divided by the largest expected number or by at least 0.1."""
    result, expected = result.astype(np.float64), expected.astype(np.float64)
    return np.max(np.abs(result - expected)) / max(np.max(np.abs(expected)), 0.1)


def run(leaf, x, d_y, frame, order=None, **tiles):
    kernels = lucid_solve.LucidSolveKernels()
    with forced(**{**SMALL, **tiles}), checked(order):
        y, residuals = kernels.forward(leaf, x, frame)
        return y, residuals, kernels.backward(leaf, x, frame, y, residuals, d_y)


def check(leaf, x, d_y, frame, dtype="float32", bound=None, order=None, **tiles):
    """Output and gradients against the definition in float64, whatever the padding contains."""
    bound = BOUNDS[dtype] if bound is None else bound
    given = {name: a.astype(DTYPES[dtype]) for name, a in x.items()}
    d_given = d_y.astype(DTYPES[dtype])
    exact = {name: filled(a.astype(np.float64), frame, 0) for name, a in given.items()}
    d_exact = filled(d_given.astype(np.float64), frame, 0)
    y = filled(leaf.forward(exact, frame)[0], frame, 0)
    expected = leaf.backward(exact, frame, y, (), d_exact)
    given = {name: filled(a, frame, np.nan) for name, a in given.items()}
    before = {name: a.tobytes() for name, a in given.items()}
    result, residuals, gradients = run(
        leaf, given, filled(d_given, frame, np.nan), frame, order, **tiles
    )
    shapes = lucid_solve.LucidSolveKernels().residual_shapes(leaf, {"v": (result.shape, dtype)})
    assert [(r.shape, str(r.dtype)) for r in residuals] == [tuple(s) for s in shapes]
    assert result.dtype == given["v"].dtype
    assert error(result, y) < bound
    for name, gradient in expected.items():
        assert gradients[name].dtype == given[name].dtype
        assert error(gradients[name], filled(gradient, frame, 0)) < 2 * bound, name
        assert given[name].tobytes() == before[name]


@pytest.mark.parametrize("order", ORDERS)
def test_lengths_around_the_edges_of_blocks_and_super_blocks(order):
    for t in (1, 15, 16, 17, 32, 33, 65):
        check(*problem(t, b=1, n=2, beta=True), order=order)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype):
    for t, lengths in ((33, None), (40, [40, 13]), (65, None)):
        b = 1 if lengths is None else 2
        check(*problem(t, b=b, beta=True, valid=lengths and valid_up_to(t, lengths)), dtype)


def test_for_one_token_y_is_its_value():
    leaf, x, d_y, frame = problem(1)
    x, d_y = {name: a.astype(np.float32) for name, a in x.items()}, d_y.astype(np.float32)
    y, _, result = run(leaf, x, d_y, frame)
    np.testing.assert_array_equal(y, x["v"])
    np.testing.assert_array_equal(result["v"], d_y)
    assert not result["k"].any()


@pytest.mark.parametrize("keys", ["equal", "zero"])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_keys_that_coincide_or_are_zero(keys, eps):
    check(*problem(50, b=1, keys=keys, eps=eps), bound=1e-4)


def valid_up_to(t, lengths):
    return np.arange(t)[None] < np.asarray(lengths)[:, None]


@pytest.mark.parametrize("lengths", [(40, 13), (40, 0)])
def test_padding_has_no_effect(lengths):
    check(*problem(40, beta=True, valid=valid_up_to(40, lengths)))


@pytest.mark.parametrize("beta", [False, True])
def test_masked_tokens_in_the_middle_have_no_effect(beta):
    valid = np.random.default_rng(0).random((2, 50)) < 0.7
    check(*problem(50, beta=beta, valid=valid))


def test_segments_are_independent():
    check(*problem(50, segments=True, beta=True))


@pytest.mark.parametrize("lengths", [(64, 32, 32), (32, 64, 16)])
def test_tiles_of_other_segments_are_not_multiplied(lengths):
    """Entries of Φ between segments are 0, but multiplying them by NaN would give NaN."""
    leaf, x, d_y, frame = problem(sum(lengths), beta=True)
    ids = np.repeat(np.arange(3), lengths)
    position, segment = frame.q_position, np.stack([ids, ids])
    frame = Frame(position, position, None, None, segment, segment)
    x, d_y = {name: a.astype(np.float32) for name, a in x.items()}, d_y.astype(np.float32)
    y, _, expected = run(leaf, x, d_y, frame)
    expected["y"] = y
    invalid = {name: np.where(others(ids, a), a, np.float32(np.nan)) for name, a in x.items()}
    y, _, result = run(leaf, invalid, np.where(others(ids, d_y), d_y, np.float32(np.nan)), frame)
    result["y"] = y
    for name, array in expected.items():
        np.testing.assert_array_equal(result[name][:, ids != 1], array[:, ids != 1], name)


def others(ids, array):
    """Whether a token is not of segment 1, in the shape of the array."""
    return (ids != 1).reshape(1, -1, *[1] * (array.ndim - 2))


def test_small_cotangents_beside_large_ones_keep_their_digits():
    """dv of a token depends on its own cotangent and on later ones, which are small here."""
    leaf, x, d_y, frame = problem(34, b=1)
    d_y[:, :3] *= 4000
    d_y[:, 3:] *= 0.002
    x, d_y = {name: a.astype(np.float16) for name, a in x.items()}, d_y.astype(np.float16)
    exact = {name: a.astype(np.float64) for name, a in x.items()}
    y = leaf.forward(exact, frame)[0]
    expected = leaf.backward(exact, frame, y, (), d_y.astype(np.float64))["v"][:, 3:]
    found = run(leaf, x, d_y, frame)[2]["v"].astype(np.float64)[:, 3:]
    assert np.abs(found - expected).max() < 5e-3 * np.abs(expected).max()


def test_rows_that_are_no_multiples_of_16_bytes():
    check(*problem(35, d=5, e=3))
    check(*problem(35, d=5, e=3, b=1), "bfloat16")


@pytest.mark.thorough
def test_keys_that_are_normalised_already():
    """No operand has 16 bits then, so almost all of the error is the rounding of the result."""
    check(*problem(34, normalize="given", beta=True), "bfloat16", 5e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_channels_of_very_different_sizes(dtype):
    """Each channel is as accurate as alone, although the largest float16 is 65504."""
    leaf, x, _, frame = problem(34, b=1, spread=1e4)
    given = {name: a.astype(DTYPES[dtype]) for name, a in x.items()}
    expected = leaf.forward({name: a.astype(np.float64) for name, a in given.items()}, frame)[0]
    with forced(**SMALL), checked():
        result, _ = lucid_solve.LucidSolveKernels().forward(leaf, given, frame)
    for channel in range(expected.shape[3]):
        one, wanted = result[..., channel].astype(np.float64), expected[..., channel]
        assert np.max(np.abs(one - wanted)) < BOUNDS[dtype] * np.max(np.abs(wanted))


def test_large_gradients_in_half_precision():
    """Products of dv and y overflow float16; the gradient of the keys does not."""
    leaf, x, d_y, frame = problem(34, b=1, n=1)
    check(leaf, {**x, "v": 60 * x["v"]}, 100 * d_y, frame, "float16")
    # Rows that grow from tile to tile, and rows of 10⁻²⁰.
    grows = np.logspace(-20, 20, 34)[None, :, None, None]
    leaf, x, d_y, frame = problem(34, b=1, n=1)
    x = {**x, "v": x["v"] * 1e3}
    given = {name: a.astype(DTYPES["bfloat16"]) for name, a in x.items()}
    d_given = (d_y * grows).astype(DTYPES["bfloat16"])
    exact = {name: a.astype(np.float64) for name, a in given.items()}
    y = leaf.forward(exact, frame)[0]
    expected = leaf.backward(exact, frame, y, (), d_given.astype(np.float64))
    result = run(leaf, given, d_given, frame)[2]
    assert error(result["k"], expected["k"]) < 2e-2


@pytest.mark.thorough
def test_wide_rows_and_tiles_of_unequal_sizes():
    """Several chunks of values with an incomplete last one, and tiles of several blocks."""
    tiles = {
        "lucid_inverse": Configuration(32, 64),
        "lucid_update": Configuration(32, 16),
        "lucid_gradient": Configuration(16, 32),
    }
    check(*problem(70, d=68, e=132, b=1, n=1, beta=True), "bfloat16", **tiles)


@pytest.mark.thorough
def test_tiles_larger_than_the_problem():
    tiles = {
        "lucid_inverse": Configuration(64, 256),
        "lucid_update": Configuration(16, 32),
        "lucid_gradient": Configuration(32, 16),
    }
    for t in (20, 70, 129):
        check(*problem(t, b=1, n=1), **tiles)


def test_any_strides():
    leaf, x, d_y, frame = problem(20, b=1)
    x, d_y = {name: a.astype(np.float32) for name, a in x.items()}, d_y.astype(np.float32)
    d_y = np.broadcast_to(d_y[:, :1], d_y.shape)
    strided = {name: np.asfortranarray(a) for name, a in x.items()}
    y, _, result = run(leaf, strided, d_y, frame)
    expected, _, wanted = run(leaf, x, d_y.copy(), frame)
    np.testing.assert_array_equal(y, expected)
    for name in result:
        np.testing.assert_array_equal(result[name], wanted[name])


def test_the_order_of_threads_does_not_matter():
    leaf, x, d_y, frame = problem(50, beta=True, b=1)
    x, d_y = {name: a.astype(np.float32) for name, a in x.items()}, d_y.astype(np.float32)
    results = []
    for order in ORDERS:
        y, residuals, result = run(leaf, x, d_y, frame, order)
        results.append((y, *residuals, *result.values()))
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            np.testing.assert_array_equal(one, other)


# ---- One token at a time --------------------------------------------------------------------


def sequences(t, h, n, d, e, dtype="float32", beta=False, b=2):
    rng = np.random.default_rng(t)
    x = {
        name: rng.normal(size=(b, t, *size))
        for name, size in {"q": (h, d), "k": (n, d), "v": (n, e)}.items()
    }
    x["k"] = 0.3 * x["k"] + x["k"][:, :1]
    if beta:
        x["lucid_beta"] = 2 * rng.random((b, t, n))
    return {name: a.astype(DTYPES[dtype]) for name, a in x.items()}


def at(x, start, stop):
    return {name: a[:, start:stop] for name, a in x.items()}


DECODED = {
    "float32": (4, 2, 12, 20, False),
    "float16": (3, 1, 16, 32, True),
    "bfloat16": (2, 2, 16, 32, False),
}


@pytest.mark.parametrize("dtype", DECODED)
def test_decoding_after_a_cache(dtype):
    """Capacities with aligned and unaligned rows; caches that end within a tile, and at its end."""
    h, n, d, e, beta = DECODED[dtype]
    x, m = sequences(37, h, n, d, e, dtype, beta), pa.Lucid(beta=beta)
    expected = m(**{name: a.astype(np.float64) for name, a in x.items()}, backend="reference")
    for capacity, first in ((40, 31), (37, 0)):
        cache = m.init_cache(**x, capacity=capacity)
        if first:
            _, cache = m.extend(cache, **at(x, 0, first), backend="portable")
        for i in range(first, first + 4):
            with forced(**SMALL), checked(i):
                out, cache = m.extend(cache, **at(x, i, i + 1), backend="cupy")
            assert out.dtype == x["v"].dtype
            assert error(out[:, 0], expected[:, i]) < {**BOUNDS, "bfloat16": 1e-2}[dtype]


@pytest.mark.parametrize("options", [{"eps": 0.0}, {"normalize": "queries_and_keys"}])
def test_decoding_with_other_norms(options):
    x, m = sequences(20, 4, 2, 12, 20), pa.Lucid(**options)
    x["k"][:, ::3] = 0
    check_a_step(m, x, 18)


def test_decoding_with_a_tile_of_many_query_heads():
    """Two warps; the second one computes the key."""
    check_a_step(pa.Lucid(), sequences(20, 19, 1, 12, 20), 18)


def test_decoding_wide_rows():
    check_a_step(pa.Lucid(scale=0.1), sequences(35, 2, 1, 100, 132, "bfloat16"), 34, 2e-2)


def test_decoding_with_scores_whose_exponentials_overflow():
    x = sequences(36, 4, 2, 12, 20)
    x["q"] *= 300
    check_a_step(pa.Lucid(), x, 35, 1e-4)


def check_a_step(m, x, held, bound=2e-5, **options):
    """One step against the reference's, with `options` that differ between the steps."""
    wide = {name: a.astype(np.float64) for name, a in x.items()}
    exact, cache = (
        m.init_cache(**a, capacity=40, key_mask="key_mask" in options) for a in (wide, x)
    )
    before, now = ({name: o[i] for name, o in options.items()} for i in (0, 1))
    _, exact = m.extend(exact, **at(wide, 0, held), **before, backend="reference")
    _, cache = m.extend(cache, **at(x, 0, held), **before, backend="portable")
    expected, exact = m.extend(exact, **at(wide, held, held + 1), **now, backend="reference")
    unseen = np.arange(40)[None] >= np.asarray(cache.length)[:, None]
    unseen[:, :held] |= ~before.get("key_mask", np.ones((1, held), bool))
    for name, buffer in cache.store.items():
        if name != "key_mask":
            buffer[unseen] = np.nan
    new = at(x, held, held + 1)
    how = {**now, "backend": ("cupy", "portable")}
    assert "cupy" in m.explain(**new, **how, cache=cache).backends
    with forced(**SMALL), checked():
        result, cache = m.extend(cache, **new, **how)
    assert error(result, expected) < bound
    np.testing.assert_array_equal(cache.length, exact.length)
    for name, buffer in exact.store.items():
        # Masked entries may be anything, or 0.
        both = np.isfinite(cache.store[name]) & np.isfinite(buffer)
        assert error(np.where(both, cache.store[name], 0), np.where(both, buffer, 0)) < bound, name


@pytest.mark.parametrize("processors", [1, 6])
def test_decoding_sequences_of_unequal_lengths(processors, monkeypatch):
    """One sequence begins with the step, and one has no new token.

    A cache is read in one part, or in one part for each tile; a short sequence has fewer tiles.
    """
    monkeypatch.setattr(lucid_step, "processors", lambda: processors)
    x = sequences(21, 2, 2, 12, 20, b=3)
    check_a_step(pa.Lucid(), x, 20, lengths=(np.asarray([20, 0, 7]), np.asarray([1, 1, 0])))


def test_decoding_with_masked_keys():
    """Masked keys may be anything; a query with a masked key attends to the keys before it."""
    x = sequences(21, 2, 2, 12, 20, b=3, beta=True)
    masks = np.random.default_rng(0).random((3, 20)) < 0.6, np.asarray([[True], [False], [True]])
    masks[0][2] = False
    is_masked = ~np.concatenate(masks, axis=1)
    x["k"][is_masked] = x["v"][is_masked] = x["lucid_beta"][is_masked] = np.nan
    check_a_step(pa.Lucid(beta=True), x, 20, key_mask=masks)


def test_a_nan_in_a_key_reaches_the_next_steps():
    x, m = sequences(4, 4, 1, 12, 20), pa.Lucid()
    x["k"][:, 1, 0, 3] = np.nan
    cache = m.init_cache(**x, capacity=8)
    for t in range(4):
        with forced(**SMALL), checked(t):
            out, cache = m.extend(cache, **at(x, t, t + 1), backend="cupy")
        assert np.isnan(out).all() == np.isnan(out).any() == (t >= 1)
