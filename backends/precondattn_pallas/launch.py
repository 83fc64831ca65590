"""Launching a kernel: named arrays in, named arrays out, each with the block that a program sees.

A kernel is a function of two dictionaries of references, what it reads and what it writes, and of
constants by name. Arrays are padded to whole tiles before, so that no block has an edge.
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

from precondattn_pallas.configurations import Configuration

Arrays = Mapping[str, tuple[Any, pl.BlockSpec]]


def launch(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    inputs: Arrays,
    outputs: Arrays,
    cut: Configuration,
    /,
    *,
    interpret: bool,
    overwrites: str = "",
    **constants: Any,
) -> dict[str, Any]:
    """The outputs, whose arrays are given as shapes with dtypes.

    `overwrites` names an input that becomes the output of that name, in its memory; what no program
    writes of it stays.
    """
    names = sorted(inputs), sorted(outputs)
    aliases = {names[0].index(overwrites): names[1].index(overwrites)} if overwrites else {}
    found: dict[str, Any] = pl.pallas_call(
        partial(kernel, **constants),
        grid=grid,
        in_specs=({name: spec for name, (_, spec) in inputs.items()},),
        out_specs={name: spec for name, (_, spec) in outputs.items()},
        out_shape={name: shape for name, (shape, _) in outputs.items()},
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=interpret,
    )({name: array for name, (array, _) in inputs.items()})
    return found


def shape_of(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def divide(number: Any, by: int) -> Any:
    """Of an index, rounded down."""
    return lax.div(number, jnp.int32(by))


def remainder(number: Any, by: int) -> Any:
    return lax.rem(number, jnp.int32(by))


def whole(count: int, unit: int) -> int:
    """As many units as hold so many."""
    return -(-count // unit)


def loop(low: Any, high: Any, body: Callable[[Any, Any], Any], start: Any) -> Any:
    """`body(i, carried)` for low ≤ i < high, in 32 bits whatever JAX's default is."""
    return lax.fori_loop(jnp.int32(low), jnp.int32(high), body, start)
