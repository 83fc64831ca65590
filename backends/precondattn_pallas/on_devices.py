"""A runner's methods on several devices, of which each computes its own sequences and heads."""

from __future__ import annotations

from functools import partial

import jax

from precondattn.arrays import Tree
from precondattn.frameworks.jax.backend import JaxRunner
from precondattn.frameworks.jax.sharding import on_shards


def on_devices(verb: str, runner: JaxRunner, *arrays: Tree) -> Tree:
    """The runner's method of that name."""
    leaves = jax.tree.leaves(arrays)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return on_shards(verb, runner, *arrays)
    if any(len(leaf.devices()) > 1 for leaf in leaves):
        return _compiled(verb, runner, *arrays)
    return runner.computing(verb)(*arrays)


@partial(jax.jit, static_argnums=(0, 1))
def _compiled(verb: str, runner: JaxRunner, *arrays: Tree) -> Tree:
    return on_shards(verb, runner, *arrays)
