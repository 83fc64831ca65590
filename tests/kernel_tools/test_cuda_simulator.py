"""The CUDA simulator runs correct kernels in any order of blocks and threads."""

import numpy as np
import pytest

from precondattn_kernel_tools.cuda_simulator import checked
from tests.kernel_tools.cuda_examples.launches import (
    ORDERS,
    TYPES,
    kernels,
    normal,
    turns,
    unwritten,
)
from tests.kernel_tools.toolchain import needs_simulator

pytestmark = needs_simulator


def tiles(count):
    return -(-count // 8)


@pytest.mark.parametrize(("name", "order"), [*zip(TYPES, ORDERS, strict=True)])
def test_transposes_products_and_sums_by_tiles(name, order):
    """Sizes around a tile of 8 and around a warp, in each type and in an order of threads."""
    dtype, int32 = TYPES[name], np.int32
    rounding = {"__half": 2e-3, "__nv_bfloat16": 2e-2}.get(name, 1e-5)
    with checked(order):
        for rows, columns in ((1, 1), (5, 3), (7, 9), (8, 8), (17, 15)):
            x, y = normal(rows, columns, dtype=dtype), unwritten(columns, rows, dtype=dtype)
            grid = (tiles(columns), tiles(rows))
            kernels().get_function(f"transpose<{name}, 8>")(
                grid, (8, 8), (x, y, int32(rows), int32(columns))
            )
            assert (y == x.T).all()
        for rows, inner, columns in ((3, 5, 2), (8, 8, 8), (9, 17, 7)):
            a, b = normal(rows, inner, dtype=dtype), normal(inner, columns, dtype=dtype, seed=1)
            c = unwritten(rows, columns, dtype=dtype)
            grid, sizes = (tiles(columns), tiles(rows)), map(int32, (rows, inner, columns))
            kernels().get_function(f"product<{name}, 8>")(grid, (8, 8), (a, b, c, *sizes))
            exact = a.astype(np.float64) @ b.astype(np.float64)
            np.testing.assert_allclose(c.astype(np.float64), exact, rtol=rounding, atol=1e-5)
        for count in (0, 1, 127, 128, 129):
            x, y = normal(count, dtype=dtype), unwritten(1)
            arguments = (x, y, int32(count))
            kernels().get_function(f"total<{name}>")((1,), (128,), arguments, shared_mem=16)
            np.testing.assert_allclose(y[0], x.astype(np.float64).sum(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_votes_and_reductions_are_correct(order):
    x = np.random.default_rng(0).integers(0, 5, 32, np.int32)
    y = np.zeros((32, 8), np.uint32)
    with checked(order):
        kernels().get_function("votes")((1,), (32,), (x, y))
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    assert (y[:, 0] == bits[x > 2].sum()).all()
    assert not y[:, 1].any()
    assert (y[:, 2] == 1).all()
    assert (y[:, 3] == x.sum()).all()
    assert (y[:, 4] == x.max()).all()
    assert (y[:, 5] == [bits[x == value].sum() for value in x]).all()
    assert (y[:, 6] == np.where(np.arange(32) % 8, np.roll(x, 1), x)).all()
    assert (y[:, 7] == (x == 1).sum()).all()


@pytest.mark.parametrize("order", ORDERS)
def test_lanes_and_blocks_can_wait_for_each_other(order):
    x, y, of_warp = normal(5, 48), unwritten(5, 48), unwritten(32)
    of_blocks, total, tickets = unwritten(5), unwritten(1), np.zeros((2, 1), np.uint32)
    with checked(order):
        kernels().get_function("running_sum")((1,), (32,), (x[0, :32].copy(), of_warp))
        kernels().get_function("chain")((5,), (48,), (x, y, tickets[0], np.zeros(5, np.uint32)))
        parts = x.ravel()[:40].copy()
        kernels().get_function("grid_total")((5,), (32,), (parts, of_blocks, tickets[1], total))
    np.testing.assert_allclose(of_warp, x[0, :32].cumsum(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y, x.cumsum(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(total[0], parts.sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_every_thread_of_every_block_runs_once(order):
    y, count = np.full((2 * 3 * 2, 4 * 3 * 2), -1, np.int32), np.zeros(1, np.int32)
    with checked(order):
        kernels().get_function("places")((2, 3, 2), (4, 3, 2), (y, count))
    assert (y == 100 * np.arange(12)[:, None] + np.arange(24)).all()
    assert count == 2 * 3 * 2 * 24


def test_the_seed_determines_the_order():
    assert turns(None) == list(range(12))
    assert turns("reverse") == list(range(12))[::-1]
    drawn = [turns(seed) for seed in range(3)]
    assert len({tuple(order) for order in [*drawn, range(12)]}) == 4
    assert all(sorted(order) == list(range(12)) for order in drawn)
    assert turns(2) == drawn[2]
    with checked(2):
        assert turns(None) == list(range(12))
        with pytest.raises(ValueError, match="seed has to be None, 'reverse' or an integer"):
            checked("forward").__enter__()


@pytest.mark.parametrize("name", ["__half", "__nv_bfloat16"])
def test_arithmetic_in_16_bits_rounds_to_the_nearest(name):
    dtype = TYPES[name]
    x, z, wide = normal(64, dtype=dtype), normal(64, dtype=dtype, seed=1), normal(64, seed=2)
    wide[:8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, 1e-30, 1 + 2.0**-8]
    y = unwritten(3, 64, dtype=dtype)
    kernels().get_function(f"arithmetic<{name}>")((1,), (64,), (x, z, wide, y, np.int32(64)))
    with np.errstate(over="ignore"):
        expected = np.stack([x * z, x + z, wide.astype(dtype)])
    np.testing.assert_array_equal(y.astype(np.float32), expected.astype(np.float32))


def test_a_name_must_match_one_kernel_and_a_tile_may_be_larger_than_the_problem():
    assert "product<__half, 8>" in kernels()._built.names
    with pytest.raises(KeyError, match=r"no kernel 'product<__half, 16>' among 'transpose<__half"):
        kernels().get_function("product<__half, 16>")
