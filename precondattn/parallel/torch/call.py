"""A call as all layouts receive it: this process's arguments, and the processes that take part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from precondattn.algebra.declaration import Axis, Pattern
from precondattn.algebra.mechanism import Mechanism
from precondattn.algebra.piece import BackendNames
from precondattn.arrays import Arrays, Shape, dtype_name
from precondattn.execution.input_names import CALL_OPTIONS, inputs_by_name
from precondattn.execution.pair_masks import refuse_divided
from precondattn.frameworks.torch.dtensor_sharding import MASKS
from precondattn.parallel.heads import HeadAxes
from precondattn.parallel.layouts import TokenOrder, TokenPart
from precondattn.parallel.torch.processes import MeshProcesses

WHOLE = ("lengths", "cu_seqlens")
"""The masks that every process has whole: they have entries per sequence, not per token."""


class Bound(NamedTuple):
    """The inputs and masks of a call by name, as tensors of this process."""

    patterns: Mapping[str, Pattern]
    inputs: dict[str, Tensor]
    masks: Arrays
    axes: dict[str, HeadAxes]
    """The time and head axes of each input"""
    tokens: tuple[int, int]
    """The numbers of queries and of keys on this process"""
    is_distributed: bool
    """Whether the inputs with tokens were DTensors"""

    @property
    def with_tokens(self) -> list[str]:
        return [name for name, axes in self.axes.items() if axes.time is not None]

    def of_time(self, name: str) -> tuple[int, Axis]:
        """The axis of an input along which its tokens are divided, and its letter."""
        time = self.axes[name].time
        assert time is not None  # Only called for inputs `with_tokens`.
        return time, self.patterns[name].axes[time]

    def times(self, name: str, tokens: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The number of tokens of an input on every process."""
        _, axis = self.of_time(name)
        return tuple(axis.multiple * n for n in tokens[axis.letter])

    def whole_shape(self, name: str, tokens: Mapping[str, tuple[int, ...]]) -> Shape:
        """The shape of an input with all tokens."""
        shape = list(self.inputs[name].shape)
        if name in self.with_tokens:
            shape[self.of_time(name)[0]] = sum(self.times(name, tokens))
        return tuple(shape)

    def __str__(self) -> str:
        """The properties that must be the same on all processes: all but the number of tokens."""
        said = []
        for name, x in self.inputs.items():
            letters = dict([self.of_time(name)]) if name in self.with_tokens else {}
            said.append(f"{name} {described(x, letters)}")
        for name, mask in sorted(self.masks.items()):
            if name in WHOLE:
                said.append(f"{name} {torch.as_tensor(mask, device='cpu').tolist()}")
            else:
                said.append(f"{name} {dtype_name(mask)} ({mask.shape[0]}, s)")
        return "; ".join(said)


def described(x: Tensor, letters: Mapping[int, Axis] | None = None) -> str:
    """The dtype, shape and need of a gradient of a tensor; axes in `letters` may have any size."""
    shape = [str(n) for n in x.shape]
    for at, axis in (letters or {}).items():
        shape[at] = axis.letter
    gradient = ", with gradient" if torch.is_grad_enabled() and x.requires_grad else ""
    return f"{dtype_name(x)} ({', '.join(shape)}){gradient}"


@dataclass(frozen=True)
class DividedCall:
    """A call that all processes have agreed on."""

    mechanism: Mechanism
    processes: MeshProcesses
    bound: Bound
    tokens: dict[str, tuple[int, ...]]
    """The number of queries (key "t") and of keys (key "s") on every process"""
    sizes: dict[str, int]
    """The size of each dimension letter, with all tokens"""
    backend: BackendNames
    order: TokenOrder | None = None
    """The order of the tokens; None in the layout `heads`"""

    @property
    def devices(self) -> int:
        return self.processes.devices

    @property
    def rank(self) -> int:
        return self.processes.rank

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of tokens of each process."""
        return self.tokens["t"]

    @cached_property
    def parts(self) -> tuple[TokenPart, ...]:
        """All parts of the sequence, in the order of the sequence."""
        assert self.order is not None  # Only `heads` has none.
        return self.order.parts(self.counts)

    def parts_of(self, process: int) -> list[TokenPart]:
        """The parts of one process, in the order of the sequence."""
        return [part for part in self.parts if part.device == process]

    def refusal_of_tokens(self) -> str | None:
        """The reason why the tokens can not be divided; None if they can."""
        if self.tokens["t"] != self.tokens["s"]:
            return (
                f"expects as many queries as keys on every process; found {self.tokens['t']} and "
                f"{self.tokens['s']}"
            )
        return None


def bind(
    mechanism: Mechanism, mesh: DeviceMesh, arrays: tuple[Tensor, ...], named: Mapping[str, Tensor]
) -> Bound:
    """The arguments of a call, checked."""
    refuse_divided(str(mechanism), named)
    patterns = mechanism.inputs
    masks = {name: named[name] for name in MASKS if named.get(name) is not None}
    arguments = {name: array for name, array in named.items() if name not in MASKS}
    inputs = inputs_by_name(str(mechanism), patterns, arrays, arguments, CALL_OPTIONS)
    of_tokens = {name: mask for name, mask in masks.items() if name not in WHOLE}
    for name, x in {**inputs, **of_tokens}.items():
        pattern = patterns[name] if name in patterns else MASKS[name]
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor; found {type(x).__name__}")
        if x.ndim != len(pattern.axes):
            raise ValueError(f"{name} is declared ({pattern.text}); found shape {tuple(x.shape)}")
    axes = {name: HeadAxes.of_pattern(patterns[name], tuple(x.shape)) for name, x in inputs.items()}
    has_tokens = {name: axis.time is not None for name, axis in axes.items()}
    kinds = {isinstance(x, DTensor) for name, x in inputs.items() if has_tokens[name]}
    if len(kinds) > 1:
        kind_of = {n: type(x).__name__ for n, x in inputs.items() if has_tokens[n]}
        found = ", ".join(f"{name} is a {kind}" for name, kind in kind_of.items())
        raise TypeError(f"inputs with tokens must all be DTensors, or none of them; {found}")
    parts = {name: local_part(name, x, axes[name].time, mesh) for name, x in inputs.items()}
    masks |= {name: local_part(name, mask, 1, mesh) for name, mask in of_tokens.items()}
    bound = Bound(patterns, parts, masks, axes, (0, 0), kinds == {True})
    return bound._replace(tokens=_tokens(bound))


def local_part(name: str, x: Tensor, time: int | None, mesh: DeviceMesh) -> Tensor:
    """This process's tokens of an array, or the whole array if it has no tokens to divide."""
    if not isinstance(x, DTensor):
        return x
    expected: Placement = Replicate() if time is None else Shard(time)
    if x.device_mesh != mesh or tuple(x.placements) != (expected,):
        raise ValueError(
            f"{name} must be {expected} on {mesh}; found {tuple(x.placements)} on {x.device_mesh}"
        )
    # Each process has one term of the gradient of an array that all have.
    return x.to_local(grad_placements=[Partial() if time is None else expected])


def _tokens(bound: Bound) -> tuple[int, int]:
    """The numbers of queries and of keys, after a check that all inputs and masks agree."""
    counts: dict[str, tuple[int, str]] = {}
    of_masks = [(n, "s", mask.shape[1]) for n, mask in bound.masks.items() if n not in WHOLE]
    of_inputs = []
    for name in bound.with_tokens:
        time, axis = bound.of_time(name)
        count = bound.inputs[name].shape[time] // axis.multiple
        of_inputs.append((name, axis.letter, count))
    for name, letter, count in [*of_inputs, *of_masks]:
        expected, by = counts.setdefault(letter, (count, name))
        if count != expected:
            raise ValueError(f"{name} has {count} tokens, and {by} has {expected}")
    b = next(iter(bound.inputs.values())).shape[0]
    for name, _, _ in of_masks:
        if bound.masks[name].shape[0] != b:
            raise ValueError(
                f"{name} has {bound.masks[name].shape[0]} sequences, and inputs have {b}"
            )
    t, s = (counts.get(letter, next(iter(counts.values())))[0] for letter in "ts")
    return t, s
