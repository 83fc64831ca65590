"""Launches of kernels on a TPU: named inputs, outputs and scratch.

A kernel is a function of three dictionaries of references, for inputs, outputs and scratch memory
that programs share in sequence, and of constants by name. Programs run in the grid's order, except
that a TPU with two cores may split the first axis: nothing may depend on the order along it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from precondattn.arrays import Array, Arrays
from precondattn_pallas.launch import Constant, Interpret

Blocks = Mapping[str, tuple[Array, pl.BlockSpec]]

LANES = 128
"""Elements of a vector register's row: widths and token counts of tiles are multiples of it."""

SUBLANES = 8
"""Rows of a vector register."""


def launch(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    inputs: Blocks,
    outputs: Blocks,
    scratch: Mapping[str, Array] | None = None,
    /,
    *,
    interpret: Interpret,
    **constants: Constant,
) -> Arrays:
    """Launch the kernel; outputs are declared as shapes with dtypes.

    `interpret` is JAX's: False, or the parameters of its interpreter of TPU kernels.
    """
    result: Arrays = pl.pallas_call(
        partial(kernel, **constants),
        grid=grid,
        in_specs=({name: spec for name, (_, spec) in inputs.items()},),
        out_specs={name: spec for name, (_, spec) in outputs.items()},
        out_shape={name: shape for name, (shape, _) in outputs.items()},
        scratch_shapes=(dict(scratch or {}),),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", *["arbitrary"] * (len(grid) - 1))
        ),
        interpret=interpret,
        name=kernel.__name__,
    )({name: array for name, (array, _) in inputs.items()})
    return result


def block(*shape: int | None, at: Callable[..., tuple[Array, ...]]) -> pl.BlockSpec:
    """A block of an array, at the index that `at` computes from a program's, with 32-bit indices.

    JAX's default may be 64 bits, which a TPU does not support for indices.
    """
    return pl.BlockSpec(shape, lambda *program: tuple(map(jnp.int32, at(*program))))


IN_MEMORY = pl.BlockSpec(memory_space=pl.ANY)
"""An array that is not copied to the kernel, which copies the parts it needs."""


def scalars(**arrays: Array) -> Blocks:
    """Small arrays of integers, whole, in scalar memory (SMEM); None is left out."""
    spec = pl.BlockSpec(memory_space=pltpu.SMEM)
    return {name: (array, spec) for name, array in arrays.items() if array is not None}


def padded(array: Array, *sizes: int) -> Array:
    """The array padded with zeros to these sizes of all axes but the first."""
    grown = zip((array.shape[0], *sizes), array.shape, strict=True)
    return jnp.pad(array, [(0, size - has) for size, has in grown])


def in_lanes(width: int) -> int:
    """A width, padded to whole rows of registers."""
    return -(-width // LANES) * LANES
