"""Methods of the backend as compiled functions, with the leaf as a static argument.

Outside `jax.jit`, an algorithm of hundreds of operations would otherwise be compiled one operation
at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

import precondattn.execution.autograd_jax  # noqa: F401  (It registers frames as pytrees.)
from precondattn_jax import chunkwise, definition, layout, read_log_mean_exp, triangular_inverse


def compiled(method: Callable[..., Any], backend: Any, mechanism: Any, *arrays: Any) -> Any:
    """backend.method(mechanism, *arrays)"""
    return _call(method, backend, mechanism, _sizes(), *arrays)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _call(
    method: Callable[..., Any], backend: Any, mechanism: Any, sizes: tuple[int, ...], *arrays: Any
) -> Any:
    return method(backend, mechanism, *arrays)


def _sizes() -> tuple[int, ...]:
    """Module constants that compiled functions depend on; tests change them."""
    return (
        layout.BLOCK,
        layout.FEWEST,
        layout.REFLECTIONS,
        layout.TILE,
        triangular_inverse.LEAF,
        chunkwise.CHUNK,
        chunkwise.GROUP,
        definition.TOKENS,
        read_log_mean_exp.ELEMENTS,
    )
