"""PyTorch under `torch.compile`: a call is one node of the captured graph.

Dynamo sees only strings and tensors and does not trace into the call. The rest is then traced with
fake tensors, like any other code: the checks of shapes, the plan, and the calls of the plan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from precondattn.algebra import registry
from precondattn.algebra.names import piece_named
from precondattn.cache import Cache
from precondattn.execution import run
from precondattn.execution.build import build_and_call

Names = tuple[str, ...]


@torch.compiler.allow_in_graph
def captured_call(
    mechanism: str, backend: Any, names: Names, tensors: tuple[Tensor, ...], masks: Any
) -> Tensor:
    """`Mechanism.__call__` on `tensors`, whose input names are `names`."""
    out: Tensor = run.call(
        piece_named(mechanism), (), dict(zip(names, tensors, strict=True)), backend, *masks
    )
    return out


@torch.compiler.allow_in_graph
def captured_extend(
    mechanism: str,
    backend: Any,
    length: Tensor,
    keys: Names,
    buffers: tuple[Tensor, ...],
    names: Names,
    tensors: tuple[Tensor, ...],
    masks: Any,
) -> tuple[Tensor, ...]:
    """`Mechanism.extend`: the output, the new length, and the buffers."""
    out, cache = run.extend(
        piece_named(mechanism),
        Cache(length, dict(zip(keys, buffers, strict=True))),
        (),
        dict(zip(names, tensors, strict=True)),
        backend,
        *masks,
        donate=False,
    )
    return (out, cache.length, *(cache.store[key] for key in keys))


@torch.compiler.allow_in_graph
def captured_shorthand(
    name: str,
    arrays: tuple[Tensor, ...],
    names: Names,
    tensors: tuple[Tensor, ...],
    options: Names,
    values: tuple[Any, ...],
) -> Tensor:
    """A shorthand such as `pa.lucid`, which constructs its mechanism from options."""
    named = {**dict(zip(names, tensors, strict=True)), **dict(zip(options, values, strict=True))}
    out: Tensor = build_and_call(registry.find(name), arrays, named)
    return out
