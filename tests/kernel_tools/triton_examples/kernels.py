"""Small correct and faulty kernels, for testing the kernel checks."""

from typing import NamedTuple

import triton
import triton.language as tl

from precondattn_kernel_tools.triton_compiler import Variant


@triton.jit
def scale(x, y, count, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < count) * factor, mask=at < count)


class Strided(NamedTuple):
    array: object
    step: object
    shift: object


@triton.jit
def shifted(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    result = tl.load(x.array + x.step * at)
    if x.shift is not None:
        result += x.shift
    tl.store(y + at, result)


@triton.jit
def copy(x, y, count, first, step, BLOCK: tl.constexpr, ATOMIC: tl.constexpr = False):
    """Reads within x, and writes `count` elements of y at any address."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    result = tl.load(x + at, mask=at < count)
    if ATOMIC:
        tl.atomic_add(y + first + step * at, result, mask=at < count)
    else:
        tl.store(y + first + step * at, result, mask=at < count)


@triton.jit
def sum_of_first(x, y, count, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    """Without an `other`, the lanes beyond `count` are undefined."""
    at = tl.arange(0, BLOCK)
    if OTHER:
        tl.store(y, tl.sum(tl.load(x + at, mask=at < count, other=0), 0))
    else:
        tl.store(y, tl.sum(tl.load(x + at, mask=at < count), 0))


@triton.jit
def read(x, y, first, step, BLOCK: tl.constexpr):
    """Reads a block of x at any address."""
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + first + step * at))


@triton.jit
def first_of_each(tensors, y, BLOCK: tl.constexpr):
    """Reads from a tuple of tensors."""
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(tensors[0] + at) + tl.load(tensors[1] + at))


@triton.jit
def total(x, y, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    """A race without atomics: if two programs add at the same time, one addition is lost."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    result = tl.sum(tl.load(x + at), 0)
    if ATOMIC:
        tl.atomic_add(y, result)
    else:
        tl.store(y, tl.load(y) + result)


@triton.jit
def arithmetic(x, y, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at)
    b = tl.load(y + at)
    tl.store(out + at, a * b)
    tl.store(out + BLOCK + at, a / b)
    tl.store(out + 2 * BLOCK + at, tl.maximum(a, b) - tl.abs(a))
    tl.store(out + 3 * BLOCK + at, tl.where(a > b, a, 1.5))


@triton.jit
def cast(x, y, ROUNDING: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    result = tl.load(x + at).to(y.dtype.element_ty, fp_downcast_rounding=ROUNDING)
    tl.store(y + at, result)


@triton.jit
def product(a, b, c, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    i = tl.arange(0, SIZE)
    at = i[:, None] * SIZE + i[None, :]
    result = tl.dot(tl.load(a + at), tl.load(b + at), input_precision=PRECISION)
    tl.store(c + at, result.to(c.dtype.element_ty))


@triton.jit
def staged_product(a, b, c, count, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    """As many tiles of a and b are in shared memory as there are stages."""
    i = tl.arange(0, SIZE)
    k = tl.arange(0, DEPTH)
    result = tl.zeros((SIZE, SIZE), tl.float32)
    for step in range(count):
        at = step * DEPTH + k
        rows = tl.load(a + i[:, None] * count * DEPTH + at[None, :])
        result = tl.dot(rows, tl.load(b + at[:, None] * SIZE + i[None, :]), result)
    tl.store(c + i[:, None] * SIZE + i[None, :], result)


@triton.jit
def sum_of_tiles(x, y, count, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A float32 tile, entirely in registers, loaded in two parts."""
    at = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    result = tl.zeros((ROWS, WIDTH), tl.float32)
    for i in range(count):
        result += tl.load(x + i * ROWS * WIDTH + at)
    tl.store(y + at, result)


def variants(target):
    tensors = {"x": "*bf16", "y": "*bf16"}
    others = {"count": "i32", "factor": "fp32"}
    yield Variant("scale", scale, {**tensors, **others}, {"BLOCK": 256}, {"num_warps": 4})
    entries = Strided("*fp32", "i32", "constexpr")
    constants = {(0, 2): None, "BLOCK": 64}
    yield Variant(
        "shifted",
        shifted,
        {"x": entries, "y": "*fp32"},
        constants,
        {"num_warps": 1},
        divisible=((0, 1),),
    )
    for size in (32, 8):  # tl.dot refuses the second.
        constants = {"SIZE": size, "PRECISION": "ieee"}
        tensors = dict.fromkeys("abc", "*fp16")
        yield Variant(f"product {size}", product, tensors, constants, {"num_warps": 4})
    yield Variant(
        "needs too much shared memory",
        staged_product,
        {"a": "*fp16", "b": "*fp16", "c": "*fp32", "count": "i32"},
        {"SIZE": 32, "DEPTH": 256},
        {"num_warps": 4, "num_stages": 8},
    )
    yield Variant(
        "spills",
        sum_of_tiles,
        {"x": "*fp32", "y": "*fp32", "count": "i32"},
        {"ROWS": 16, "WIDTH": 512},
        {"num_warps": 1},
    )
