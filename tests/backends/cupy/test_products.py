"""Products of tiles: in plain C++, and by tensor cores, whose two instructions are emulated.

For tensor cores the tests prove the addresses of the lanes, and which lane has which number.
"""

import functools
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import precondattn as pa
from precondattn_cupy.launch import CPP_TYPES, _defined
from precondattn_cupy.sources import FOLDER
from precondattn_kernel_tools.cuda_simulator import SimulatedModule, checked
from tests.backends.cupy import simulated
from tests.backends.cupy.attention import check, problem
from tests.kernel_tools.toolchain import needs_simulator

pytestmark = needs_simulator

HERE = Path(__file__).with_name("cuda_tensors")
HALF, WAYS = ("float16", "bfloat16"), tuple(product((False, True), repeat=2))
SIZES = ((16, 16), (48, 32), (32, 80))
"""Sizes of COLUMNS and DEPTH."""


def expression(is_tensor, a_transposed, b_transposed, columns, depth, dtype):
    flags = ", ".join(str(f).lower() for f in (is_tensor, a_transposed, b_transposed))
    return f"product<{flags}, {columns}, {depth}, {CPP_TYPES[dtype]}>"


KINDS = [*product((True,), HALF), *product((False,), (*HALF, "float32"))]
"""Pairs (by tensor cores or not, dtype)."""


def held_expression(is_tensor, b_transposed, columns, depth, dtype):
    flags = ", ".join(str(f).lower() for f in (is_tensor, b_transposed))
    return f"held_product<{flags}, {columns}, {depth}, {CPP_TYPES[dtype]}>"


@functools.cache
def module():
    ways = [expression(kind, *way, *size, dtype)
            for (kind, dtype), way, size in product(KINDS, WAYS, SIZES)]  # fmt: skip
    held = [held_expression(kind, way, *size, dtype)
            for (kind, dtype), way, size in product(KINDS, (False, True), SIZES)]  # fmt: skip
    options = (f"-I{FOLDER}", "-DPRECONDATTN_EMULATED_TENSORS")
    return SimulatedModule(HERE / "products.cu", [*ways, *held], options)


@pytest.mark.thorough(but=("True-float16-way2-size2", "True-bfloat16-way2-size2"))
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("is_tensor", "dtype"), KINDS)
def test_products_of_tiles(is_tensor, dtype, way, size):
    (columns, depth), rows = size, 32
    rng = np.random.default_rng(0)
    a = rng.standard_normal((rows, depth)).astype(simulated.DTYPES[dtype])
    b = rng.standard_normal((depth, columns)).astype(a.dtype)
    c = np.full((rows, columns), np.nan, np.float32)
    kernel = module().get_function(expression(is_tensor, *way, *size, dtype))
    kernel.max_dynamic_shared_size_bytes = 1 << 16
    for order in simulated.ORDERS:
        with checked(order):
            kernel((1,), (2 * rows,), (a, b, c, np.int32(rows)), shared_mem=1 << 16)
        np.testing.assert_allclose(c, wide(a) @ wide(b), rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize(("is_tensor", "dtype"), KINDS)
def test_products_whose_left_factor_is_in_registers(is_tensor, dtype, b_transposed, size):
    (columns, depth), rows = size, 32
    rng = np.random.default_rng(0)
    a = rng.standard_normal((rows, depth)).astype(np.float32)
    b = rng.standard_normal((depth, columns)).astype(simulated.DTYPES[dtype])
    c = np.full((rows, columns), np.nan, np.float32)
    kernel = module().get_function(held_expression(is_tensor, b_transposed, *size, dtype))
    for order in simulated.ORDERS:
        with checked(order):
            kernel((1,), (2 * rows,), (a, b, c), shared_mem=1 << 14)
        np.testing.assert_allclose(c, wide(a.astype(b.dtype)) @ wide(b), rtol=0, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mechanism", "dtype"), [(pa.Softmax(), "bfloat16"), (pa.Laser(), "float16")]
)
def test_attention_by_tensor_cores(mechanism, dtype, monkeypatch):
    """Every row that its kernels pass to tensor cores begins at a multiple of 16 bytes."""
    monkeypatch.setattr("precondattn_cupy.launch._simulated", emulated)
    leaf = mechanism.program.leaves[0]
    x, d_out = problem(20, d=24, e=24, b=1, h=2, n=1, dtype=dtype)
    check(x, d_out, leaf=leaf, gradient_bound=4e-2)
    now = {name: array[:, 19:] for name, array in x.items()}
    cache = mechanism.init_cache(**x, capacity=22)
    past = {name: array[:, :19] for name, array in x.items()}
    _, cache = mechanism.extend(cache, **past, backend="portable")
    result, _ = mechanism.extend(cache, **now, backend=("cupy", "portable"))
    wanted, _ = mechanism.extend(cache, **now, backend="portable")
    assert simulated.error(result, wanted) < 2e-2


@functools.cache
def emulated(file, kernel, precise):
    code = f'#include "emulated_tensors.cuh"\n#include "{file}.cu"\n'
    options = (f"-I{HERE}", f"-I{FOLDER}", "-DPRECONDATTN_EMULATED_TENSORS", *_defined(precise))
    return SimulatedModule(code, [kernel], options).get_function(kernel)


def wide(array):
    return array.astype(np.float64)
