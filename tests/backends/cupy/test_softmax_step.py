"""Steps of softmax attention and LASER by one token, against the definition, in the simulator."""

import numpy as np
import pytest

import precondattn as pa
from precondattn.backend import Request
from precondattn_cupy.softmax import step as softmax_step
from precondattn_cupy.softmax.leaf import SoftmaxKernels
from precondattn_kernel_tools.cuda_simulator import checked
from tests.backends.cupy.attention import unwritten_is_nan
from tests.backends.cupy.simulated import DTYPES, ORDERS, TOLERANCES, error
from tests.kernel_tools.toolchain import needs_simulator

__all__ = ["unwritten_is_nan"]
pytestmark = pytest.mark.usefixtures("unwritten_is_nan")

MECHANISMS = {"softmax": pa.Softmax(), "laser": pa.Laser()}
MINE = ("cupy", "portable")


def inputs(t, *, b=2, h=2, n=1, d=16, e=16, dtype="float32", spread=1.0):
    rng = np.random.default_rng(t)
    shapes = {"q": (b, t, h, d), "k": (b, t, n, d), "v": (b, t, n, e)}
    x = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    x["v"] *= spread
    return {name: array.astype(DTYPES[dtype]) for name, array in x.items()}


def last_output(mechanism, x, held, backend, *, capacity=None, order=None, **masks):
    """The output of the last token, with a cache of all tokens before it."""
    capacity = capacity or held + 3
    cache = mechanism.init_cache(
        **{name: array[:, :1] for name, array in x.items()},
        capacity=capacity,
        key_mask="key_mask" in masks,
    )
    if held:
        before = {name: mask[0] for name, mask in masks.items()}
        past = {name: array[:, :held] for name, array in x.items()}
        _, cache = mechanism.extend(cache, **past, **before, backend="reference")
    now = {name: mask[1] for name, mask in masks.items()}
    new = {name: array[:, held:] for name, array in x.items()}
    with checked(order):
        out, cache = mechanism.extend(cache, **new, **now, backend=backend)
    return out, cache


def check(name, x, held, **options):
    mechanism = MECHANISMS[name]
    shapes = {key: array[:, held:] for key, array in x.items()}
    out, cache = last_output(mechanism, x, held, MINE, **options)
    wide = {key: array.astype(np.float64) for key, array in x.items()}
    wanted, expected = last_output(mechanism, wide, held, "reference", **options)
    assert out.dtype == x["v"].dtype
    assert out.shape == (*shapes["q"].shape[:3], x["v"].shape[3])
    assert error(out, wanted) < TOLERANCES[str(x["v"].dtype)]
    for key, buffer in cache.store.items():
        np.testing.assert_array_equal(buffer.astype(np.float64), expected.store[key])
    return out


@pytest.fixture(autouse=True)
def only_ours(monkeypatch):
    """A step by the portable backend is an error."""
    monkeypatch.setattr("precondattn_portable.backend.AlgorithmRunner.step", None)


@needs_simulator
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("held", [0, 1, 63, 64, 65, 300])
def test_caches_of_every_length_and_dtype(held, dtype, name):
    check(name, inputs(held + 1, b=1, dtype=dtype), held)


@needs_simulator
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("order", ORDERS)
def test_any_order_of_blocks_and_threads_gives_the_definition(order, name):
    check(name, inputs(131, h=4, n=2, d=12, e=5), 130, order=order)


@needs_simulator
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("capacity", [136, 140])
def test_a_cache_with_unused_capacity(capacity, name):
    check(name, inputs(131), 130, capacity=capacity)


@needs_simulator
@pytest.mark.parametrize("name", MECHANISMS)
def test_more_query_heads_per_key_head_than_a_tile_has_rows(name):
    check(name, inputs(40, b=1, h=38, n=2), 39)


@needs_simulator
@pytest.mark.parametrize("name", MECHANISMS)
def test_wide_rows(name):
    check(name, inputs(40, b=1, d=70, e=100), 39)


@needs_simulator
@pytest.mark.parametrize("spread", [1e-2, 100.0])
def test_values_of_any_size(spread):
    check("laser", inputs(131, spread=spread), 130)


@needs_simulator
@pytest.mark.parametrize("name", MECHANISMS)
def test_sequences_of_unequal_lengths(name):
    lengths = np.array([50, 0, 17]), np.array([1, 1, 0])
    x = inputs(51, b=3)
    for i in range(3):
        for array in x.values():
            array[i, lengths[0][i] : 50] = np.nan
    out = check(name, x, 50, lengths=lengths)
    assert (out[2] == 0).all()


@needs_simulator
@pytest.mark.parametrize("name", MECHANISMS)
def test_masked_keys_may_contain_nan(name):
    x = inputs(51, b=3)
    mask = np.arange(50) % 5 > 1
    past = mask[None] & np.array([True, True, False])[:, None]
    new = np.array([[True], [False], [False]])
    for key in ("k", "v"):
        x[key][:, :50][~past] = np.nan
        x[key][:, 50:][~new] = np.nan
    out = check(name, x, 50, key_mask=(past, new))
    assert (out[2] == 0).all()


@needs_simulator
@pytest.mark.parametrize("at", [3, 5])
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_nan_in_a_key_of_the_cache_or_the_new_one_reaches_the_output(name, at):
    x = inputs(6)
    x["k"][:, at, 0, 3] = np.nan
    out, _ = last_output(MECHANISMS[name], x, 5, MINE)
    assert np.isnan(out).all()


def refusal(leaf, *, t=1, h=2, d=64, e=64):
    shapes = (("q", (1, t, h, d)), ("k", (1, t, 1, d)), ("v", (1, t, 1, e)))
    request = Request("extend", "numpy", "cpu", "float16", shapes, frozenset())
    return SoftmaxKernels().refuses(leaf, request)


@pytest.mark.parametrize(
    ("leaf", "changes", "reason"),
    [
        (pa.Softmax(), {"t": 2}, "one token; found t=2"),
        (pa.Softmax(window=3), {}, "no window"),
        (pa.Softmax(bias=True), {}, "a bias"),
        (pa.Softmax(), {"d": 257}, "keys of at most 256 channels; found 257"),
        (pa.Softmax(), {"e": 129}, "values of at most 128 channels; found 129"),
        (pa.Softmax(), {"h": 65536}, "at most 65535 sequences"),
    ],
)
def test_unsupported_steps_are_declined_with_the_reason(leaf, changes, reason):
    assert reason in refusal(leaf, **changes)


def test_supported_steps_are_accepted():
    for size in ({}, {"d": 256, "e": 128}, {"d": 1, "e": 3}):
        assert refusal(pa.Softmax(), **size) is None


def test_every_block_consists_of_full_tiles():
    tile = softmax_step.WARPS * softmax_step.COLUMNS
    for count in (0, 1, 63, 64, 65, 1000):
        for heads in (1, 3, 100):
            splits, each = softmax_step._splits(count, heads)
            assert each % tile == 0
            assert splits * each >= count > (splits - 1) * each or count == splits == 0
