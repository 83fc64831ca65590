"""The simulator of CUDA: what is right runs in any order, and what is planted wrong is found."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ml_dtypes")

import ml_dtypes

from precondattn_conformance.kernels import cuda_toolkit
from precondattn_conformance.kernels.cuda_simulator import (
    CompilationError,
    KernelError,
    MissingToolError,
    OutOfBoundsError,
    RaceError,
    SimulatedModule,
    SynchronizationError,
    UninitializedError,
    checked,
    compilation,
)

try:
    cuda_toolkit.include_folder()
except MissingToolError as missing:
    pytest.skip(str(missing), allow_module_level=True)
if shutil.which("g++") is None:
    pytest.skip("g++ is not installed", allow_module_level=True)

EXAMPLES = Path(__file__).parent / "cuda_examples"
ORDERS = [None, "reverse", 0, 1]
BFLOAT16 = ml_dtypes.bfloat16
TYPES = {
    "__half": np.float16,
    "__nv_bfloat16": BFLOAT16,
    "float": np.float32,
    "double": np.float64,
}
PAIRS = {"__half": "__half2", "__nv_bfloat16": "__nv_bfloat162"}
EXPRESSIONS = [
    *(f"transpose<{name}, 8>" for name in TYPES),
    *(f"product<{name}, 8>" for name in TYPES),
    *(f"total<{name}>" for name in TYPES),
    *(f"arithmetic<{name}>" for name in PAIRS),
    *(f"functions<{name}, {PAIRS[name]}>" for name in PAIRS),
]


@pytest.fixture(scope="module")
def kernels():
    return SimulatedModule(EXAMPLES / "kernels.cu", EXPRESSIONS)


@pytest.fixture(scope="module")
def faults():
    return SimulatedModule(EXAMPLES / "faults.cu")


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def unwritten(*shape, dtype=np.float32):
    return np.full(shape, np.nan, dtype)


def tiles(count):
    return -(-count // 8)


# What is right.


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 3), (7, 9), (8, 8), (17, 15)])
def test_a_transpose_by_tiles(kernels, name, rows, columns, order):
    x, y = normal(rows, columns, dtype=TYPES[name]), unwritten(columns, rows, dtype=TYPES[name])
    with checked(order):
        kernels.get_function(f"transpose<{name}, 8>")(
            (tiles(columns), tiles(rows)), (8, 8), (x, y, np.int32(rows), np.int32(columns))
        )
    assert (y == x.T).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("rows", "inner", "columns"), [(3, 5, 2), (8, 8, 8), (9, 17, 7)])
def test_a_product_by_tiles(kernels, name, rows, inner, columns, order):
    a, b = normal(rows, inner, dtype=TYPES[name]), normal(inner, columns, dtype=TYPES[name], seed=1)
    c = unwritten(rows, columns, dtype=TYPES[name])
    with checked(order):
        kernels.get_function(f"product<{name}, 8>")(
            (tiles(columns), tiles(rows)), (8, 8), (a, b, c, *map(np.int32, (rows, inner, columns)))
        )
    exact = a.astype(np.float64) @ b.astype(np.float64)
    one_rounding = {"__half": 2e-3, "__nv_bfloat16": 2e-2}.get(name, 1e-5)
    np.testing.assert_allclose(c.astype(np.float64), exact, rtol=one_rounding, atol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("count", [0, 1, 127, 128, 129])
def test_a_sum_by_shuffles_and_dynamic_shared_memory(kernels, name, count, order):
    x, y = normal(count, dtype=TYPES[name]), unwritten(1)
    with checked(order):
        kernels.get_function(f"total<{name}>")((1,), (128,), (x, y, np.int32(count)), shared_mem=16)
    np.testing.assert_allclose(y[0], x.astype(np.float64).sum(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_lanes_that_wait_for_each_other_alone(kernels, order):
    x, y = normal(32), unwritten(32)
    with checked(order):
        kernels.get_function("running_sum")((1,), (32,), (x, y))
    np.testing.assert_allclose(y, x.cumsum(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_votes_and_reductions(kernels, order):
    x = np.random.default_rng(0).integers(0, 5, 32, np.int32)
    y = np.zeros((32, 8), np.uint32)
    with checked(order):
        kernels.get_function("votes")((1,), (32,), (x, y))
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
def test_blocks_that_hand_over_behind_a_fence(kernels, order):
    x, of_blocks, y = normal(5 * 8), unwritten(5), unwritten(1)
    with checked(order):
        kernels.get_function("grid_total")((5,), (32,), (x, of_blocks, np.zeros(1, np.uint32), y))
    np.testing.assert_allclose(y[0], x.sum(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_that_wait_for_the_one_that_started_before(kernels, order):
    x, y = normal(5, 48), unwritten(5, 48)
    ticket, is_ready = np.zeros(1, np.uint32), np.zeros(5, np.uint32)
    with checked(order):
        kernels.get_function("chain")((5,), (48,), (x, y, ticket, is_ready))
    np.testing.assert_allclose(y, x.cumsum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_every_thread_of_every_block_runs_once(kernels, order):
    y, count = np.full((2 * 3 * 2, 4 * 3 * 2), -1, np.int32), np.zeros(1, np.int32)
    with checked(order):
        kernels.get_function("places")((2, 3, 2), (4, 3, 2), (y, count))
    assert (y == 100 * np.arange(12)[:, None] + np.arange(24)).all()
    assert count == 2 * 3 * 2 * 24


def turns(kernels, order):
    y = np.full(12, -1, np.int32)
    with checked(order):
        kernels.get_function("turns")((3,), (4,), (y, np.zeros(1, np.int32)))
    return y.tolist()


def test_the_order_is_that_of_the_seed(kernels):
    assert turns(kernels, None) == list(range(12))
    assert turns(kernels, "reverse") == list(range(12))[::-1]
    drawn = [turns(kernels, seed) for seed in range(3)]
    assert len({tuple(order) for order in [*drawn, range(12)]}) == 4
    assert all(sorted(order) == list(range(12)) for order in drawn)
    assert turns(kernels, 2) == drawn[2]
    with checked(2):
        assert turns(kernels, None) == list(range(12))
        with pytest.raises(ValueError, match="seed has to be None, 'reverse' or an integer"):
            checked("forward").__enter__()


@pytest.mark.parametrize("name", ["__half", "__nv_bfloat16"])
def test_arithmetic_in_16_bits_rounds_to_the_nearest(kernels, name):
    dtype = TYPES[name]
    x, z, wide = normal(64, dtype=dtype), normal(64, dtype=dtype, seed=1), normal(64, seed=2)
    wide[:8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, 1e-30, 1 + 2.0**-8]
    y = unwritten(3, 64, dtype=dtype)
    kernels.get_function(f"arithmetic<{name}>")((1,), (64,), (x, z, wide, y, np.int32(64)))
    with np.errstate(over="ignore"):
        expected = np.stack([x * z, x + z, wide.astype(dtype)])
    np.testing.assert_array_equal(y.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("name", PAIRS)
def test_functions_that_the_headers_have_for_a_gpu_only(kernels, name):
    dtype = TYPES[name]
    x, wide = normal(32, dtype=dtype), normal(32, seed=1)
    wide[0] = np.nan
    y, z = unwritten(3, 32, dtype=dtype), unwritten(3, 32)
    kernels.get_function(f"functions<{name}, {PAIRS[name]}>")((1,), (32,), (x, wide, y, z))
    exact, addend = x.astype(np.float64), wide.astype(dtype).astype(np.float64)
    expected = [exact * exact + addend, np.exp(exact), exact * exact + exact]
    expected[2] = expected[2].reshape(16, 2)[:, ::-1].ravel()
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(y.astype(np.float64), np.stack(expected), rtol=eps, atol=1e-6)
    assert (z[0] == np.fmax(wide, 0)).all()  # Of a NaN and a number, the number.
    np.testing.assert_array_equal(z[1], abs(wide))
    np.testing.assert_allclose(z[2], np.where(np.isnan(wide), 1, np.exp(-(wide**2))), rtol=1e-6)


def test_numbers_by_value(kernels):
    y = unwritten(7, dtype=np.float64)
    given = (np.int32(-3), np.uint32(2**32 - 1), -(2**40), np.float32(0.5), 0.1, True)
    kernels.get_function("numbers")((1,), (1,), (y, *given, np.float16(1.5)))
    assert y.tolist() == [-3, 2**32 - 1, -(2**40), 0.5, 0.1, 1, 1.5]


def test_views_are_as_on_a_gpu_and_nothing_else_is_written(kernels):
    whole = normal(4, 40)
    before = whole.copy()
    kernels.get_function("copy_vectors")((1,), (4,), (whole[0, 4:20], whole[2, 8:24]))
    assert (whole[2, 8:24] == before[0, 4:20]).all()
    whole[2, 8:24] = before[2, 8:24]
    assert (whole == before).all()
    with pytest.raises(OutOfBoundsError, match=r"at byte 0 of .* no multiple of 16, line \d+ of"):
        kernels.get_function("copy_vectors")((1,), (1,), (whole[0, 3:19], whole[2, 8:24]))


def test_arrays_that_share_memory_share_it_in_the_kernel(kernels):
    x = normal(32)
    expected = x[:32].cumsum()
    kernels.get_function("running_sum")((1,), (32,), (x, x))
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-5)
    x = np.zeros(2, np.int32)
    kernels.get_function("places")((1,), (1,), (x[1:], x))
    assert x.tolist() == [1, 0]


def test_a_name_is_one_kernel_and_a_tile_may_be_larger_than_the_problem(kernels):
    assert "product<__half, 8>" in kernels._built.names
    with pytest.raises(KeyError, match=r"no kernel 'product<__half, 16>' among 'transpose<__half"):
        kernels.get_function("product<__half, 16>")


# What is wrong.

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
def test_a_planted_fault_is_found_at_its_line(faults, name, kind, says, order):
    if name == "missing_barrier" and order is not None:
        kind, says = (RaceError, UninitializedError), "of row"
    x, y = normal(64), unwritten(64)
    with checked(order), pytest.raises(kind, match=says) as error:
        faults.get_function(name)((2,), (64,), (x, y, np.int32(64)), shared_mem=128)
    named = {int(line) for line in re.findall(r"line (\d+) of faults.cu", str(error.value))}
    assert named <= set(lines_of(name))
    assert bool(named) == bool(lines_of(name))
    assert str(error.value).startswith(f"{name}: ")
    assert re.search(r"thread \(\d+, 0, 0\) of block \([01], 0, 0\)", str(error.value))
    assert np.isnan(y).all()  # Nothing of a launch that failed is kept.


@pytest.mark.skipif(not compilation._takes_pattern(), reason="g++ before 12 can not")
def test_a_local_variable_that_no_one_has_written_shows(faults):
    y = unwritten(4)
    faults.get_function("uninitialized_local")((1,), (4,), (normal(64), y, np.int32(64)))
    assert (abs(y) > 1e30).all()


def test_every_fault_is_tried():
    text = "\n".join(LINES)
    assert re.findall(r"(?m)^FAULT (\w+)\(", text) == [name for name, *_ in FAULTS]


def test_behind_a_fault_all_is_as_before(faults, kernels):
    for _ in range(3):
        with pytest.raises(SynchronizationError):
            faults.get_function("divergent_barrier")(
                (1,), (64,), (normal(64), unwritten(64), np.int32(64))
            )
        assert turns(kernels, None) == list(range(12))


NEEDED = re.compile(r"__syncthreads\(\);|__syncwarp\(\);|__threadfence\(\);")


@pytest.fixture(scope="module")
def weakened():
    """The examples, each of whose barriers and fences can be left out."""
    text, count = (EXAMPLES / "kernels.cu").read_text(), iter(range(100))
    text = NEEDED.sub(lambda found: f"if (left_out != {next(count)}) {found[0]}", text)
    switch = 'static int left_out;\nextern "C" __global__ void leave_out(int i) { left_out = i; }\n'
    names = ["transpose<float, 8>", "product<float, 8>", "total<float>"]
    return SimulatedModule(switch + text, names, [f"-I{EXAMPLES}"])


def failing(module, i, order):
    """The examples that fail without the barrier or fence of that number."""
    module.get_function("leave_out")((1,), (1,), (np.int32(i),))
    number, ticket = np.int32, np.zeros(1, np.uint32)
    launches = [
        ("transpose<float, 8>", 2, (8, 8), (normal(9, 10), normal(10, 9), number(9), number(10))),
        (
            "product<float, 8>",
            2,
            (8, 8),
            (normal(9, 17), normal(17, 10), unwritten(9, 10), *map(number, (9, 17, 10))),
        ),
        ("total<float>", 1, (128,), (normal(200), unwritten(1), number(200))),
        ("running_sum", 1, (32,), (normal(32), unwritten(32))),
        ("grid_total", 5, (32,), (normal(40), unwritten(5), ticket, unwritten(1))),
        ("chain", 5, (48,), (normal(240), unwritten(240), ticket.copy(), np.zeros(5, np.uint32))),
    ]
    failed = []
    for name, blocks, block, args in launches:
        grid = (blocks, 2) if len(block) == 2 else (blocks,)
        try:
            with checked(order):
                module.get_function(name)(grid, block, args, shared_mem=16)
        except (RaceError, UninitializedError) as error:
            failed.append(str(error).partition(":")[0])
    return failed


@pytest.mark.parametrize("order", ORDERS)
def test_no_barrier_and_no_fence_can_be_left_out(weakened, order):
    count = len(NEEDED.findall((EXAMPLES / "kernels.cu").read_text()))
    assert count == 14
    assert failing(weakened, -1, order) == []
    for i in range(count):
        assert len(failing(weakened, i, order)) == 1, i


# What can not be launched, or built.


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"grid": (0,)}, ValueError, r"grid has to be from 1 to .* not \(0,\)"),
        ({"grid": 1}, ValueError, "grid has to have one to three numbers, not 1"),
        ({"block": (65, 16)}, ValueError, "block has 1040 threads, of 1024 at most"),
        ({"shared_mem": 50000}, ValueError, "shared_mem has to be at most 49152 bytes, not 50000"),
        ({"args": ()}, TypeError, "takes 3 arguments, and args has 0"),
        ({0: np.zeros(64)}, TypeError, r"args\[0\] .* floating-point of 32 bits, .* float64"),
        ({0: [0.0] * 64}, TypeError, r"args\[0\] .* has to be an array .* not list"),
        ({1: np.frombuffer(b"0" * 256, np.float32)}, ValueError, r"args\[1\] .* read-only"),
        ({2: 64}, TypeError, r"args\[2\] .* signed of 32 bits, and a value of int64 is given"),
        ({2: "64"}, TypeError, r"args\[2\] .* has to be a number .* not str"),
    ],
)
def test_what_can_not_be_launched_is_named(faults, change, kind, says):
    args = [normal(64), unwritten(64), np.int32(64)]
    launch = {"grid": (1,), "block": (64,), "args": args, "shared_mem": 0}
    for name, value in change.items():
        if isinstance(name, int):
            args[name] = value
        else:
            launch[name] = value
    with pytest.raises(kind, match=says):
        faults.get_function("asserts")(**launch)


def test_shared_memory_has_a_limit_that_can_be_raised(kernels):
    function = kernels.get_function("total<float>")
    args, large = (normal(64), unwritten(1), np.int32(64)), 100 << 10
    with pytest.raises(ValueError, match="max_dynamic_shared_size_bytes can be raised"):
        function((1,), (32,), args, shared_mem=large)
    function.max_dynamic_shared_size_bytes = large
    function((1,), (32,), args, shared_mem=large)
    with pytest.raises(ValueError, match="at most 232448, not 300000"):
        function.max_dynamic_shared_size_bytes = 300000
    static = SimulatedModule(
        'extern "C" __global__ void k() { __shared__ char x[50000]; x[0] = 0; }'
    )
    with pytest.raises(KernelError, match="needs 50000 bytes of shared memory, and may have 49152"):
        static.get_function("k")((1,), (1,), ())


@pytest.mark.parametrize(
    ("source", "options", "kind", "says"),
    [
        ('extern "C" __global__ void k() { nothing; }', {}, CompilationError, "kernel.cu:1:.*noth"),
        ("__global__ void k() {}", {}, CompilationError, "has no kernel"),
        (
            '\n__device__ void k() { asm volatile("exit;"); }',
            {},
            CompilationError,
            "line 2 has inline PTX, which is not simulated",
        ),
        (
            'extern "C" __global__ void k() { __shared__ float x = 1; }',
            {},
            CompilationError,
            "a declaration in shared memory is not understood: __shared__ float x = 1",
        ),
        ("", {"name_expressions": ["k<int>"]}, CompilationError, "k"),
        ("", {"options": ["-O3"]}, ValueError, "options has '-O3'"),
        ("", {"name_expressions": "k"}, TypeError, "have to be sequences"),
        (b"", {}, TypeError, "source has to be text or a Path, not bytes"),
    ],
)
def test_what_can_not_be_built_is_refused(source, options, kind, says):
    with pytest.raises(kind, match=says):
        SimulatedModule(source, **options)


def test_what_is_missing_is_said(monkeypatch):
    compilation._compiler.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingToolError, match=r"g\+\+ is needed"):
        SimulatedModule("")
    monkeypatch.undo()
    cuda_toolkit.include_folder.cache_clear()
    monkeypatch.setattr(cuda_toolkit, "_folders", lambda name: iter(()))
    with pytest.raises(MissingToolError, match=r"cuda_fp16.h .* pip install 'precondattn.kernels"):
        SimulatedModule("")
    cuda_toolkit.include_folder.cache_clear()


DECLARATIONS = """
struct Pair { float a, b; };
template <class T> struct Wide { typedef double type; };
template <class T, int N> __device__ T last(const T* x) {
  __shared__ T kept[N];
  if (threadIdx.x < N) kept[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  return kept[N - 1];
}
template <class T, int N> __global__ void k(const T* x, double* y) {
  __shared__ Pair pairs[N], one;
  __shared__ typename Wide<T>::type wide[N + 1][
      2];
  static __shared__ unsigned int count;
  extern __shared__ __align__(16) unsigned char bytes[];
  T* rows = reinterpret_cast<T*>(bytes);
  if (threadIdx.x == 0) count = 0, one.a = 1;
  __syncthreads();
  atomicAdd(&count, 1u);
  pairs[threadIdx.x].b = 2;
  wide[threadIdx.x][1] = 3;
  rows[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  const int i = N - 1 - threadIdx.x;
  y[threadIdx.x] = count + one.a + pairs[i].b + wide[i][1] + rows[i] + last<T, N>(x);
}
"""


def test_declarations_of_shared_memory_are_understood():
    module = SimulatedModule(DECLARATIONS, ["k<float, 32>", "k<int, 64>"], ["-DNDEBUG"])
    for name, dtype, count in (("k<float, 32>", np.float32, 32), ("k<int, 64>", np.int32, 64)):
        x, y = np.arange(count, dtype=dtype), unwritten(count, dtype=np.float64)
        for order in ORDERS:
            with checked(order):
                module.get_function(name)((1,), (count,), (x, y), shared_mem=4 * count)
            assert y.tolist() == [count + 6 + i + count - 1 for i in range(count)][::-1]
