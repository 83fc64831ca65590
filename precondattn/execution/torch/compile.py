"""PyTorch under `torch.compile`: a call is one node of the captured graph.

Dynamo sees only strings and tensors and does not trace into the call. The rest is then traced with
fake tensors, like any other code: the checks of shapes, the plan, and the calls of the plan.

A mechanism that is constructed in compiled code is a constant of the graph: `constructed` and
`parsed` make it while tracing, and return a stand-in with its name.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from precondattn.algebra import registry
from precondattn.algebra.names import piece_named
from precondattn.algebra.options import OptionValue
from precondattn.algebra.piece import BackendNames
from precondattn.algebra.registry import AnyMechanism, MechanismClass
from precondattn.algebra.text import read
from precondattn.algebra.verbs import Verbs
from precondattn.cache import Cache
from precondattn.execution import run
from precondattn.execution.shorthand import build_and_call
from precondattn.given import Given

Names = tuple[str, ...]


class Stand(Verbs):
    """A mechanism inside a graph: it has the public methods, and a name."""

    def __init__(self, name: str, positional: tuple[str, ...]) -> None:
        self._name, self._positional = name, positional


def constructed(
    cls: MechanismClass, values: tuple[OptionValue, ...], options: dict[str, OptionValue]
) -> AnyMechanism:
    """`cls(*values, **options)`, in code that Dynamo traces."""
    given = (*values, *options.values())
    is_mechanism = tuple(isinstance(value, Verbs) for value in given)
    plain = [value._name if isinstance(value, Verbs) else value for value in given]
    return _stand(_constructed(cls, tuple(options), is_mechanism, *plain))


def parsed(text: str) -> AnyMechanism:
    """`parse(text)`, in code that Dynamo traces."""
    return _stand(_parsed(text))


def _stand(described: str) -> Stand:
    name, _, positional = described.rpartition("|")
    return Stand(name, tuple(positional.split(",")))


@torch.compiler.assume_constant_result
def _constructed(
    cls: MechanismClass, options: Names, is_mechanism: tuple[bool, ...], *given: OptionValue
) -> str:
    values = [
        piece_named(value) if is_name else value
        for value, is_name in zip(given, is_mechanism, strict=True)
    ]
    count = len(values) - len(options)
    return _described(cls(*values[:count], **dict(zip(options, values[count:], strict=True))))


@torch.compiler.assume_constant_result
def _parsed(text: str) -> str:
    return _described(read(text))


def _described(mechanism: Verbs) -> str:
    return f"{mechanism._name}|{','.join(mechanism._positional)}"


@torch.compiler.allow_in_graph
def captured(function: str, *arguments: Given) -> Tensor:
    """A function by its path, `"module:name"`, whose checks Dynamo can not trace."""
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)(*arguments)


@torch.compiler.allow_in_graph
def captured_call(
    mechanism: str, backend: BackendNames, names: Names, tensors: tuple[Tensor, ...], masks: Given
) -> Tensor:
    """`Mechanism.__call__` on `tensors`, whose input names are `names`."""
    inputs = dict(zip(names, tensors, strict=True))
    return run.call(piece_named(mechanism), (), inputs, backend, masks)


@torch.compiler.allow_in_graph
def captured_extend(
    mechanism: str,
    backend: BackendNames,
    length: Tensor,
    keys: Names,
    buffers: tuple[Tensor, ...],
    names: Names,
    tensors: tuple[Tensor, ...],
    masks: Given,
) -> tuple[Tensor, ...]:
    """`Mechanism.extend`: the output, the new length, and the buffers."""
    piece, cache = piece_named(mechanism), Cache(length, dict(zip(keys, buffers, strict=True)))
    inputs = dict(zip(names, tensors, strict=True))
    out, cache = run.extend(piece, cache, (), inputs, backend, masks, donate=False)
    return (out, cache.length, *(cache.store[key] for key in keys))


@torch.compiler.allow_in_graph
def captured_shorthand(
    name: str,
    arrays: tuple[Tensor, ...],
    names: Names,
    tensors: tuple[Tensor, ...],
    options: Names,
    values: tuple[OptionValue, ...],
) -> Tensor:
    """A shorthand such as `pa.lucid`, which constructs its mechanism from options."""
    named = {**dict(zip(names, tensors, strict=True)), **dict(zip(options, values, strict=True))}
    return build_and_call(registry.find(name), arrays, named)
