"""Methods of a runner as compiled functions, with the runner as a static argument.

Outside `jax.jit`, an algorithm of hundreds of operations would otherwise be compiled one operation
at a time. On several devices, each computes its own sequences and heads.
"""

from __future__ import annotations

from functools import partial

import jax

from precondattn.arrays import Tree
from precondattn.frameworks.jax.backend import JaxRunner
from precondattn.frameworks.jax.sharding import on_shards
from precondattn_jax import chunkwise, definition, layout, read_log_mean_exp, triangular_inverse


def compiled(verb: str, runner: JaxRunner, *arrays: Tree) -> Tree:
    """The runner's method of that name."""
    # Module constants that compiled functions depend on; tests change them.
    sizes = (
        layout.BLOCK,
        layout.FEWEST,
        layout.REFLECTIONS,
        layout.TILE,
        layout.GROUPED,
        triangular_inverse.LEAF,
        chunkwise.CHUNK,
        chunkwise.GROUP,
        definition.TOKENS,
        read_log_mean_exp.ELEMENTS,
    )
    return _call(verb, runner, sizes, *arrays)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _call(verb: str, runner: JaxRunner, sizes: tuple[int, ...], *arrays: Tree) -> Tree:
    return on_shards(verb, runner, *arrays)
