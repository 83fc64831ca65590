"""PyTorch under `torch.compile`: a call is one node of the captured graph.

Dynamo does not trace into the call. Afterwards it is traced with fake tensors, like other code.

A mechanism that is constructed in compiled code is a constant of the graph. `constructed` and
`parsed` construct it while tracing, and return a stand-in with its name.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from precondattn.algebra import registry
from precondattn.algebra.call import Call
from precondattn.algebra.group import piece_named
from precondattn.algebra.options import OptionValue
from precondattn.algebra.registry import AnyMechanism, MechanismClass
from precondattn.algebra.text import read
from precondattn.algebra.verbs import Verbs
from precondattn.arrays import Arrays
from precondattn.cache import Cache
from precondattn.cache.kinds import Kinds
from precondattn.execution import run
from precondattn.execution.shorthand import build
from precondattn.given import Arguments, Given

Tensors = tuple[Tensor, ...]


class Stand(Verbs):
    """The stand-in for a mechanism inside a graph: the public methods, and a name."""

    def __init__(self, name: str) -> None:
        self._name = name


def constructed(
    cls: MechanismClass, values: tuple[OptionValue, ...], options: dict[str, OptionValue]
) -> AnyMechanism:
    """`cls(*values, **options)`, in code that Dynamo traces."""
    given = [
        (True, value._name) if isinstance(value, Verbs) else (False, value)
        for value in (*values, *options.values())
    ]
    return Stand(_constructed(cls, tuple(options), *given))


def parsed(text: str) -> AnyMechanism:
    """`parse(text)`, in code that Dynamo traces."""
    return Stand(_parsed(text))


@torch.compiler.assume_constant_result
def _constructed(
    cls: MechanismClass, options: tuple[str, ...], *given: tuple[bool, OptionValue]
) -> str:
    values = [piece_named(value) if is_name else value for is_name, value in given]
    count = len(values) - len(options)
    return str(cls(*values[:count], **dict(zip(options, values[count:], strict=True)))._name)


@torch.compiler.assume_constant_result
def _parsed(text: str) -> str:
    return str(read(text)._name)


@torch.compiler.allow_in_graph
def captured(function: str, *arguments: Given) -> Tensor:
    """The result of a function with checks that Dynamo can not trace, by path `"module:name"`."""
    module, _, name = function.partition(":")
    return getattr(import_module(module), name)(*arguments)


@torch.compiler.allow_in_graph
def captured_call(mechanism: str, *arguments: Given) -> Tensor:
    """`Mechanism.__call__`; the arguments are the fields of a `Call` after the mechanism."""
    return run.forward(Call("forward", piece_named(mechanism), *arguments))


@torch.compiler.allow_in_graph
def captured_extend(
    kinds: Kinds, length: Tensor, store: Arrays, mechanism: str, *arguments: Given
) -> Tensors:
    """`Mechanism.extend` as the output, the new length, and the buffers, which have these kinds."""
    call = Call("extend", piece_named(mechanism), *arguments)
    extend = run.extend_packed if "segment_ids" in call.masks else run.extend
    out, cache = extend(call._replace(cache=Cache(length, dict(store), kinds)))
    return (out, cache.length, *(cache.store[key] for key in store))


@torch.compiler.allow_in_graph
def captured_shorthand(name: str, arrays: Tensors, named: Arguments) -> Tensor:
    """A shorthand such as `pa.lucid`, which constructs its mechanism from options."""
    mechanism, rest = build(registry.find(name), named)
    return mechanism(*arrays, **rest)
