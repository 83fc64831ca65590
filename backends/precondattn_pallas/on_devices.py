"""Methods of the backend on several devices: each computes its own sequences and heads."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from precondattn.execution.jax.sharding import on_shards


def on_devices(backend: Any, verb: str, mechanism: Any, *arrays: Any) -> Any:
    """The backend's method of that name."""
    leaves = jax.tree.leaves(arrays)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return on_shards(backend.computing, verb, mechanism, *arrays)
    if any(len(leaf.devices()) > 1 for leaf in leaves):
        return _compiled(backend, verb, mechanism, *arrays)
    return backend.computing(verb)(mechanism, *arrays)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _compiled(backend: Any, verb: str, mechanism: Any, *arrays: Any) -> Any:
    return on_shards(backend.computing, verb, mechanism, *arrays)
