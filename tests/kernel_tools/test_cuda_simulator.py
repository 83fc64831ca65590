"""The CUDA simulator runs correct kernels in any order, and names the line of planted faults."""

import re

import numpy as np
import pytest

from precondattn_kernel_tools.cuda_simulator import (
    KernelError,
    OutOfBoundsError,
    RaceError,
    SynchronizationError,
    UninitializedError,
    checked,
)
from tests.kernel_tools.cuda_examples.launches import (
    EXAMPLES,
    ORDERS,
    TYPES,
    faults,
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


LINES = (EXAMPLES / "faults.cu").read_text().split("\n")


def lines_of(name):
    return [i for i, line in enumerate(LINES, 1) if line.endswith(f"// here {name}")]


FAULTS = [
    ("missing_barrier", UninitializedError, r"byte \d+ of row, .* no thread of the block"),
    ("missing_second_barrier", RaceError, "with no barrier between them"),
    ("missing_syncwarp", RaceError, "of row, .* with no barrier between them"),
    ("two_write", RaceError, r"writes element \d+ of args\[1\], .* has written"),
    ("two_blocks_write", RaceError, "a thread of another block, number 0 to run, has written"),
    ("missing_fence", RaceError, "with no fence between them"),
    ("divergent_barrier", SynchronizationError, "a barrier is divergent"),
    ("barrier_after_return", SynchronizationError, r"thread \(\d+, 0, 0\) has returned"),
    ("uneven_loop", SynchronizationError, "has returned"),
    ("barrier_in_a_part_of_a_warp", SynchronizationError, "a deadlock: .* waits in __syncwarp"),
    ("read_behind", OutOfBoundsError, r"reads 4 bytes at element 64 of args\[0\], float32"),
    ("read_before", OutOfBoundsError, r"reads 4 bytes at element -[12] of args\[0\]"),
    ("read_far", OutOfBoundsError, r"at element 262\d+ of args\[0\], .* which has 64"),
    ("write_behind", OutOfBoundsError, r"writes 4 bytes at element \d+ of args\[1\]"),
    ("update_behind", OutOfBoundsError, r"writes 4 bytes at element 64 of args\[1\]"),
    ("copy_behind", OutOfBoundsError, r"reads 260 bytes at element 0 of args\[0\]"),
    ("null_pointer", OutOfBoundsError, "which is in no array of the call"),
    ("shared_behind", OutOfBoundsError, r"writes 4 bytes at byte \d+ of row, which has 256"),
    ("dynamic_behind", OutOfBoundsError, "of dynamic shared memory, which has 128"),
    ("row_behind", OutOfBoundsError, r"index \d+ is outside of an array of type 'float \[9\]'"),
    ("local_behind", OutOfBoundsError, r"index \d+ is outside of an array of type 'float \[4\]'"),
    ("misaligned", OutOfBoundsError, "float4. is used at byte 4 of .* no multiple of 16"),
    ("misaligned_in_shared", OutOfBoundsError, "float4. is used at byte 0 of row"),
    ("uninitialized", UninitializedError, "reads byte 252 of row"),
    ("uninitialized_sum", UninitializedError, "reads byte 0 of sum"),
    ("left_from_another_block", UninitializedError, "no thread of the block has written"),
    ("mask_without_itself", SynchronizationError, "the mask 0x0000ffff does not name it"),
    ("mask_without_the_source", SynchronizationError, "lane .* mask 0x0000ffff does not name that"),
    ("lane_returned", SynchronizationError, r"reads lane 20 in a shuffle, .* which has returned"),
    ("lane_elsewhere", SynchronizationError, "lanes of the mask .* wait at different places"),
    ("masks_that_differ", SynchronizationError, "a deadlock: .* with the mask 0x"),
    ("waits_for_ever", SynchronizationError, "does not come to an end"),
    ("divides_by_zero", KernelError, "an integer is divided by zero"),
    ("overflows", KernelError, "an integer overflows"),
    ("asserts", KernelError, "an assertion fails: threadIdx.x < 63"),
    ("needs_much_stack", KernelError, "needs more than 128 KiB for its local variables"),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("name", "kind", "says"), FAULTS, ids=[name for name, *_ in FAULTS])
def test_a_planted_fault_is_detected_at_its_line(name, kind, says, order):
    if name == "missing_barrier" and order is not None:
        kind, says = (RaceError, UninitializedError), "of row"
    x, y = normal(64), unwritten(64)
    with checked(order), pytest.raises(kind, match=says) as error:
        faults().get_function(name)((2,), (64,), (x, y, np.int32(64)), shared_mem=128)
    named = {int(line) for line in re.findall(r"line (\d+) of faults.cu", str(error.value))}
    assert named <= set(lines_of(name))
    assert bool(named) == bool(lines_of(name))
    assert str(error.value).startswith(f"{name}: ")
    assert re.search(r"thread \(\d+, 0, 0\) of block \([01], 0, 0\)", str(error.value))
    assert np.isnan(y).all()  # A failed launch writes no results.


def test_every_fault_has_a_test():
    text = "\n".join(LINES)
    assert re.findall(r"(?m)^FAULT (\w+)\(", text) == [name for name, *_ in FAULTS]


def test_after_a_fault_the_simulator_still_works():
    for _ in range(3):
        with pytest.raises(SynchronizationError):
            faults().get_function("divergent_barrier")(
                (1,), (64,), (normal(64), unwritten(64), np.int32(64))
            )
        assert turns(None) == list(range(12))
