"""Products of tiles: in plain C++, and by tensor cores, whose two instructions are emulated.

What is proved of the latter is where their lanes point to, and which number lies in which lane.
"""

from tests import cupy_kernels  # isort: skip  # It skips where there is no simulator.

import functools
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from precondattn_conformance.kernels.cuda_simulator import SimulatedModule, checked
from precondattn_cupy.launch import CPP_TYPES
from precondattn_cupy.sources import FOLDER

HERE = Path(__file__).with_name("cuda_tensors")
HALF, WAYS = ("float16", "bfloat16"), tuple(product((False, True), repeat=2))
SIZES = ((16, 16), (48, 32), (32, 80))
"""Of COLUMNS and DEPTH."""


def expression(is_tensor, a_transposed, b_transposed, columns, depth, dtype):
    flags = ", ".join(str(f).lower() for f in (is_tensor, a_transposed, b_transposed))
    return f"product<{flags}, {columns}, {depth}, {CPP_TYPES[dtype]}>"


@functools.cache
def module():
    kinds = [*product((True,), HALF), *product((False,), (*HALF, "float32"))]
    return SimulatedModule(
        HERE / "products.cu",
        [expression(kind, *way, *size, dtype)
         for (kind, dtype), way, size in product(kinds, WAYS, SIZES)],
        (f"-I{FOLDER}", "-DPRECONDATTN_EMULATED_TENSORS"),
    )  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("is_tensor", "dtype"),
    [*product((True,), HALF), *product((False,), (*HALF, "float32"))],
)
def test_products_of_tiles(is_tensor, dtype, way, size):
    (columns, depth), rows = size, 32
    rng = np.random.default_rng(0)
    a = rng.standard_normal((rows, depth)).astype(cupy_kernels.DTYPES[dtype])
    b = rng.standard_normal((depth, columns)).astype(a.dtype)
    c = np.full((rows, columns), np.nan, np.float32)
    kernel = module().get_function(expression(is_tensor, *way, *size, dtype))
    kernel.max_dynamic_shared_size_bytes = 1 << 16
    for order in cupy_kernels.ORDERS:
        with checked(order):
            kernel((1,), (2 * rows,), (a, b, c, np.int32(rows)), shared_mem=1 << 16)
        np.testing.assert_allclose(c, wide(a) @ wide(b), rtol=0, atol=1e-4)


def wide(array):
    return array.astype(np.float64)
