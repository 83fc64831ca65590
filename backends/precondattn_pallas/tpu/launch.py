"""Launching a kernel on a TPU: named arrays in, named arrays out, and named scratch.

A kernel is a function of three dictionaries of references, what it reads, what it writes and what
it keeps from one program to the next, and of constants by name. Programs run in the grid's order,
except that a TPU with two cores may share out the first axis: nothing may depend on its order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Arrays = Mapping[str, tuple[Any, pl.BlockSpec]]

LANES = 128
"""Numbers of a vector register's row: tiles have multiples of it as width, and as tokens."""

SUBLANES = 8
"""Rows of a vector register."""


def launch(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    inputs: Arrays,
    outputs: Arrays,
    scratch: Mapping[str, Any] | None = None,
    /,
    *,
    interpret: Any,
    **constants: Any,
) -> dict[str, Any]:
    """The outputs, whose arrays are given as shapes with dtypes.

    `interpret` is JAX's: False, or the parameters of its interpreter of TPU kernels.
    """
    found: dict[str, Any] = pl.pallas_call(
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
    return found


def block(*shape: int | None, at: Callable[..., tuple[Any, ...]]) -> pl.BlockSpec:
    """A block of an array, at the place that `at` makes of a program's; in 32 bits.

    JAX's default may be 64 bits, in which a TPU has no indices.
    """
    return pl.BlockSpec(shape, lambda *program: tuple(map(jnp.int32, at(*program))))


IN_MEMORY = pl.BlockSpec(memory_space=pl.ANY)
"""An array that is not brought to the kernel, which copies what it wants."""


def filled(array: Any, *sizes: int) -> Any:
    """With zeros behind, up to these sizes of the axes but the first."""
    grown = zip((array.shape[0], *sizes), array.shape, strict=True)
    return jnp.pad(array, [(0, size - has) for size, has in grown])


def in_lanes(width: int) -> int:
    """A width, filled up to whole rows of registers."""
    return -(-width // LANES) * LANES
