"""Launches of kernels: named input and output arrays, each with the block that a program accesses.

A kernel is a function of two dictionaries of references, its inputs and its outputs, and of
constants by name. Arrays are padded to whole tiles in advance, so that no block is partial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from precondattn.arrays import Array, Arrays, DType
from precondattn_pallas.configurations import Configuration

Blocks = Mapping[str, tuple[Array, pl.BlockSpec]]

Reference = Any
"""The memory of a block, in a kernel: `reference[...]` reads it."""

References = Mapping[str, Reference]

Constant = Any
"""A compile-time constant of a kernel: a number, a size, or the precision of products."""

Interpret = Any
"""Whether JAX interprets kernels; for a TPU, possibly the `InterpretParams` of its interpreter."""


def launch(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    inputs: Blocks,
    outputs: Blocks,
    configuration: Configuration,
    /,
    *,
    interpret: bool,
    overwrites: str = "",
    **constants: Constant,
) -> Arrays:
    """Launch the kernel; outputs are declared as shapes with dtypes.

    `overwrites` names an input whose memory becomes the output of that name; elements that no
    program writes keep the input's values.
    """
    names = sorted(inputs), sorted(outputs)
    aliases = {names[0].index(overwrites): names[1].index(overwrites)} if overwrites else {}
    result: Arrays = pl.pallas_call(
        partial(kernel, **constants),
        grid=grid,
        in_specs=({name: spec for name, (_, spec) in inputs.items()},),
        out_specs={name: spec for name, (_, spec) in outputs.items()},
        out_shape={name: shape for name, (shape, _) in outputs.items()},
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(
            num_warps=configuration.warps, num_stages=configuration.stages
        ),
        interpret=interpret,
    )({name: array for name, (array, _) in inputs.items()})
    return result


def shape_of(shape: tuple[int, ...], dtype: DType) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def divide(number: Array, by: int) -> Array:
    """The quotient of an index, rounded down."""
    return lax.div(number, jnp.int32(by))


def remainder(number: Array, by: int) -> Array:
    return lax.rem(number, jnp.int32(by))


def whole(count: int, unit: int) -> int:
    """The number of units that hold `count`, rounded up."""
    return -(-count // unit)


def loop(low: Array, high: Array, body: Callable[[Array, Array], Array], start: Array) -> Array:
    """`body(i, carried)` for low ≤ i < high, with 32-bit indices whatever JAX's default is."""
    return lax.fori_loop(jnp.int32(low), jnp.int32(high), body, start)
