"""Products of tiles, in plain C++ and by tensor cores, and asynchronous copies, in the simulator.

The two instructions of tensor cores are emulated: tests prove the addresses of the lanes, and which
lane has which number.
"""

import functools
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import precondattn as pa
from precondattn_cupy.launch import CPP_TYPES, FOLDER, _defined
from precondattn_kernel_tools.cuda_simulator import SimulatedModule, checked
from tests.backends.cupy.simulated import ORDERS, check, inputs_of
from tests.backends.kernel_problems import DTYPES, error, row, wide
from tests.kernel_tools.toolchain import needs_simulator

pytestmark = needs_simulator

HERE = Path(__file__).with_name("cuda_tensors")
HALF = ("float16", "bfloat16")
SIZES = ((16, 16), (48, 32), (32, 80))
"""Sizes of COLUMNS and DEPTH."""
KINDS = [*product((True,), HALF), *product((False,), (*HALF, "float32"))]
"""Pairs (by tensor cores or not, dtype)."""
WAYS = [*product(("product",), (False, True), (False, True)), ("held_product", None, False)]
WAYS += [("held_product", None, True)]
"""Kernels, and which factors are transposed; the left factor of `held_product` is in registers."""


CASES = [
    (kind, way, SIZES[(i + j) % 3]) for i, kind in enumerate(KINDS) for j, way in enumerate(WAYS)
]


def expression(kind, way, size):
    (is_tensor, dtype), (name, *transposed) = kind, way
    flags = [str(f).lower() for f in (is_tensor, *transposed) if f is not None]
    return f"{name}<{', '.join(map(str, (*flags, *size, CPP_TYPES[dtype])))}>"


@functools.cache
def module():
    options = (f"-I{FOLDER}", "-DPRECONDATTN_EMULATED_TENSORS")
    every = [expression(*case) for case in CASES]
    return SimulatedModule(HERE / "products.cu", every, options)


@pytest.mark.thorough(but=("kind2-way2-size2", "kind11-way11-size11"))
@pytest.mark.parametrize(("kind", "way", "size"), CASES)
def test_products_of_tiles(kind, way, size):
    (columns, depth), rows, is_held = size, 32, way[0] == "held_product"
    rng = np.random.default_rng(0)
    a = rng.standard_normal((rows, depth)).astype(np.float32 if is_held else DTYPES[kind[1]])
    b = rng.standard_normal((depth, columns)).astype(DTYPES[kind[1]])
    c = np.full((rows, columns), np.nan, np.float32)
    kernel = module().get_function(expression(kind, way, size))
    kernel.max_dynamic_shared_size_bytes = 1 << 16
    sizes = () if is_held else (np.int32(rows),)
    for order in ORDERS:
        with checked(order):
            kernel((1,), (2 * rows,), (a, b, c, *sizes), shared_mem=1 << (14 if is_held else 16))
        np.testing.assert_allclose(c, wide(a.astype(b.dtype)) @ wide(b), rtol=0, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "dtype"), [("softmax", "bfloat16"), ("laser", "float16")])
def test_attention_by_tensor_cores(name, dtype, monkeypatch):
    """Every row that its kernels pass to tensor cores begins at a multiple of 16 bytes."""
    monkeypatch.setattr("precondattn_cupy.launch._simulated", emulated)
    mechanism, how = pa.parse(name), {"gradient_bound": 4e-2}
    check(row("", name, 20, dtype, d=24, e=24, how=how).values[0])
    x = inputs_of(mechanism, 20, dtype, d=24, e=24)
    past, new = ({n: a[:, part] for n, a in x.items()} for part in (slice(19), slice(19, None)))
    cache = mechanism.init_cache(**x, capacity=22)
    _, cache = mechanism.extend(cache, **past, backend="portable")
    result, _ = mechanism.extend(cache, **new, backend=("cupy", "portable"))
    wanted, _ = mechanism.extend(cache, **new, backend="portable")
    assert error(result, wanted, least=1) < 2e-2


@functools.cache
def emulated(file, kernel, precise):
    code = f'#include "emulated_tensors.cuh"\n#include "{file}.cu"\n'
    options = (f"-I{HERE}", f"-I{FOLDER}", "-DPRECONDATTN_EMULATED_TENSORS", *_defined(precise))
    return SimulatedModule(code, [kernel], options).get_function(kernel)


@pytest.mark.parametrize("reads_early", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_rows_arrive_absent_rows_are_zero_and_reading_too_early_shows(order, reads_early):
    names = ["copied<false>", "copied<true>"]
    copies = SimulatedModule(HERE / "copies.cu", names, (f"-I{FOLDER}",))
    kernel = copies.get_function(names[reads_early])
    x, is_there = np.arange(128, dtype=np.float32), np.arange(32) % 3 > 0
    to = np.full_like(x, np.nan)
    with checked(order):
        kernel((1,), (32,), (x, is_there.astype(np.uint8), to))
    arrived = np.roll(np.where(is_there[:, None], x.reshape(32, 4), 0), -1, axis=0).ravel()
    np.testing.assert_array_equal(to, np.full_like(x, np.nan) if reads_early else arrived)
