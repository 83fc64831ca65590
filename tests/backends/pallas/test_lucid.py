"""LUCID's Pallas kernels against the definition, interpreted."""

import numpy as np
import pytest

pytest.importorskip("jax")

import jax.numpy as jnp

import precondattn as pa
from precondattn.frame import Frame
from precondattn_pallas.configurations import Configuration
from precondattn_pallas.lucid.solve import LucidSolveKernels
from tests.backends.pallas.tiles import BOUNDS, check, error, frame_of, quick, rounded, small_tiles

KERNELS = LucidSolveKernels(interpret=True)


def problem(t, d=8, e=16, n=2, b=2, keys="clustered", **options):
    """A leaf, its inputs and a cotangent."""
    rng = np.random.default_rng(t)
    leaf = pa.LucidSolve(**options)
    k = 0.3 * rng.normal(size=(b, t, n, d)) + rng.normal(size=(b, 1, n, d))
    if keys == "equal":
        k = np.broadcast_to(k[:, :1], k.shape).copy()
    if keys == "zero":
        k[:, ::3] = 0
    if options.get("normalize") == "given":
        k = k / np.sqrt(np.mean(k * k, axis=-1, keepdims=True))
    x = {"k": k, "v": rng.normal(size=(b, t, n, e))}
    if leaf.beta:
        x["lucid_beta"] = 2 * rng.uniform(size=(b, t, n))
        x["lucid_beta"][:, ::4] = 0
    return leaf, x, rng.normal(size=(b, t, n, e))


@pytest.mark.parametrize(
    ("t", "dtype"), [(65, "float32"), (129, "float32"), (63, "bfloat16"), (65, "float16")]
)
def test_every_dtype_across_blocks_and_super_blocks(t, dtype):
    check(KERNELS, *problem(t, d=12, e=20, beta=True), frame_of(t, t, 2), dtype, BOUNDS[dtype])


@pytest.mark.parametrize(("keys", "eps"), [("equal", 0.0), ("zero", 0.0), ("zero", 1e-6)])
def test_keys_that_coincide_or_are_zero(keys, eps):
    given = problem(50, b=1, n=1, keys=keys, eps=eps)
    check(KERNELS, *given, frame_of(50, 50, 1), "float32", 1e-4)


@pytest.mark.parametrize(("dtype", "lengths"), [("float32", (33, 13)), ("bfloat16", (40, 0))])
def test_padding_has_no_effect(dtype, lengths):
    frame = frame_of(40, 40, 2, lengths=lengths)
    check(KERNELS, *problem(40, n=1, beta=True), frame, dtype, BOUNDS[dtype])


def test_segments_are_independent():
    frame = frame_of(70, 70, 2, segments=(7, 40))
    check(KERNELS, *problem(70), frame, "float32", 2e-5)


@pytest.mark.parametrize("lengths", [(64, 64, 16), (128, 64, 64)])
def test_tiles_of_other_segments_are_not_multiplied(lengths):
    """Entries of Φ between segments are 0, but multiplying them by NaN would give NaN."""
    leaf, x, d_y = problem(sum(lengths), beta=True)
    ids = np.repeat(np.arange(3), lengths)
    frame = Frame(None, None, k_segment=jnp.asarray(np.stack([ids, ids])))

    @quick
    def run(x, d_y):
        y, kept = KERNELS.forward(leaf, x, frame)
        return KERNELS.backward(leaf, x, frame, y, kept, d_y) | {"y": y}

    x, d_y = {name: a.astype(np.float32) for name, a in x.items()}, d_y.astype(np.float32)
    with small_tiles():
        expected = run(x, d_y)
        invalid = {name: without_segment_1(ids, a) for name, a in x.items()}
        result = run(invalid, without_segment_1(ids, d_y))
    for name, array in expected.items():
        np.testing.assert_array_equal(result[name][:, ids != 1], array[:, ids != 1], name)


def without_segment_1(ids, array):
    is_other = (ids != 1).reshape(1, -1, *[1] * (array.ndim - 2))
    return np.where(is_other, array, np.float32(np.nan))


@pytest.mark.thorough(but=("136-8",))
@pytest.mark.parametrize(("d", "e"), [(136, 8), (16, 136)])
def test_widths_that_are_no_powers_of_two_and_more_than_a_chunk(d, e):
    given = problem(18, d=d, e=e, b=1, n=1)
    check(KERNELS, *given, frame_of(18, 18, 1), "bfloat16", 2e-2)


def test_keys_that_are_normalised_already():
    given = problem(34, b=1, normalize="given")
    check(KERNELS, *given, frame_of(34, 34, 1), "bfloat16", 2e-2)


def test_shipped_tiles_of_unequal_sizes_compute_the_same():
    tiles = {
        "lucid_inverse": Configuration(64, 128),
        "lucid_update": Configuration(64, 32),
        "lucid_gradient": Configuration(16, 32),
    }
    given = problem(130, b=1, n=1, beta=True)
    check(KERNELS, *given, frame_of(130, 130, 1), "float32", 2e-5, **tiles)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_channels_of_very_different_sizes(dtype):
    """Each channel is as accurate as alone, although the largest float16 is 65504."""
    leaf, x, _ = problem(34, b=1, n=1)
    x["v"] *= 1e4 ** np.random.default_rng(0).normal(size=x["v"].shape[3])
    given, exact = ({n: rounded(a, dtype)[i] for n, a in x.items()} for i in (0, 1))
    expected, _ = leaf.forward(exact, frame_of(34, 34, 1))
    with small_tiles():
        y = quick(lambda x: KERNELS.forward(leaf, x, Frame(None, None))[0])(given)
    for channel in range(expected.shape[3]):
        assert error(y[..., channel], expected[..., channel]) < BOUNDS[dtype]


def test_for_one_token_y_is_its_value():
    leaf, x, d_y = problem(1)
    given = {name: jnp.asarray(a, dtype="float32") for name, a in x.items()}
    frame = Frame(None, None)
    with small_tiles():
        y, kept = KERNELS.forward(leaf, given, frame)
        result = KERNELS.backward(leaf, given, frame, y, kept, jnp.asarray(d_y, dtype="float32"))
    assert error(y, x["v"]) < 1e-6
    assert error(result["v"], d_y) < 1e-6
    assert not result["k"].any()
