"""A recorded call as a list of launches, which later calls with other arrays run.

A launch gets the addresses of its arrays as numbers, which Triton's launcher accepts like tensors.
Allocations that only launches use are parts of one workspace.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime import driver

from precondattn_triton.launching import HeldKernel
from precondattn_triton.replay.recorder import (
    MadeArray,
    Place,
    RecordedLaunch,
    RecordedOperator,
    Recorder,
    Value,
    found_in,
)
from precondattn_triton.replay.workspace import Lifetime, offsets_of

Result = Any
"""What a method of kernels returns: arrays in tuples and dictionaries."""


Geometry = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""The size, strides and dtype of an array."""


class ArraysOfRun:
    """The arrays of one run, by number: inputs, then what the call has made."""

    __slots__ = ("addresses", "stream", "tensors")

    def __init__(self, tensors: list[Tensor | None], addresses: list[int], stream: int) -> None:
        self.tensors, self.addresses, self.stream = tensors, addresses, stream

    def at(self, place: Place) -> Tensor:
        """The array at a place. One in a workspace of bytes is read in its own dtype."""
        array = self.tensors[place.array]
        assert array is not None
        if array.dtype != place.dtype:
            array = array.view(place.dtype)
        if (place.offset, place.size, place.stride) == (0, array.shape, array.stride()):
            return array
        start = array.storage_offset() + place.offset // array.element_size()
        return array.as_strided(place.size, place.stride, start)


class Launch(NamedTuple):
    """A launch whose arrays are given by their addresses."""

    held: HeldKernel
    grid: tuple[int, int, int]
    template: list[Value]
    """The arguments and constants, with 0 where an address is filled in."""
    filled: tuple[tuple[int, int, int], ...]
    """For each array its position among the arguments, its number, and its offset in bytes."""

    def run(self, arrays: ArraysOfRun) -> None:
        arguments, addresses = self.template.copy(), arrays.addresses
        for position, number, offset in self.filled:
            arguments[position] = addresses[number] + offset
        held, (x, y, z) = self.held, self.grid
        held.run(
            x, y, z, arrays.stream, held.function, held.metadata, None, None, None, *arguments
        )  # fmt: skip


class InterpretedLaunch(NamedTuple):
    """A launch in Triton's interpreter, which needs tensors."""

    recorded: RecordedLaunch

    def run(self, arrays: ArraysOfRun) -> None:
        kernel, _, grid, arguments, constants = self.recorded
        kernel[grid](*_filled(arguments, arrays.at), **constants)


class Operation(NamedTuple):
    """A call of one of PyTorch's operators."""

    recorded: RecordedOperator
    filled: tuple[int, ...]
    """The positions of arguments that are arrays, if no others have arrays in them; or none."""

    def run(self, arrays: ArraysOfRun) -> None:
        operator, given, keywords, results = self.recorded
        if self.filled:
            arguments = list(given)
            for position in self.filled:
                arguments[position] = arrays.at(given[position])
        else:
            arguments, keywords = _filled(given, arrays.at), _filled(keywords, arrays.at)
        result = operator(*arguments, **keywords)
        listed = result if isinstance(result, (tuple, list)) else (result,)
        for number, each in zip(results, listed, strict=True):
            if number is not None:
                arrays.tensors[number], arrays.addresses[number] = each, each.data_ptr()


class LaunchProgram:
    """The launches of a call. Its methods do not depend on the entries of arrays."""

    def __init__(self, recorder: Recorder, result: Result) -> None:
        self._result = _recorded_result(result, recorder)
        self.obstacle = recorder.obstacle
        """Why the call can not be repeated; empty if it can."""
        if self.obstacle:
            return
        self._inputs = len(recorder._inputs)
        self._count = self._inputs + len(recorder.made)
        self._steps = [_step(each) for each in recorder.steps]
        kept = {place.array for place in found_in(self._result, Place)}
        operands = set[int]().union(*map(_used_by_operator, recorder.steps))
        own = kept | operands
        lifetimes: dict[int, Lifetime] = {}
        for at, each in enumerate(recorder.steps):
            for place in found_in(each, Place):
                number = place.array
                if number >= self._inputs and number not in own:
                    size = recorder.made[number - self._inputs].bytes
                    known = lifetimes.get(number)
                    lifetimes[number] = Lifetime(known.first if known else at, at, size)
        offsets, self._workspace = offsets_of(list(lifetimes.values()))
        sizes = [each.size for each in lifetimes.values()]
        self._parts = list(zip(lifetimes, offsets, sizes, strict=True))
        """The arrays in the workspace: their numbers, offsets and sizes."""
        self._is_launched = any(isinstance(each, Launch) for each in self._steps)
        self._is_interpreted = any(isinstance(each, InterpretedLaunch) for each in self._steps)
        made = enumerate(recorder.made, self._inputs)
        self._allocated = [
            (number, *self._geometry(number, m, is_operand=number in operands))
            for number, m in made
            if number in own and not m.is_result
        ]
        self._dropped = _last_uses(recorder, own - kept, self._inputs)

    def _geometry(self, number: int, made: MadeArray, *, is_operand: bool) -> Geometry:
        """How an array is allocated: as the result has it, if that is all of its memory."""
        places = {place for place in found_in(self._result, Place) if place.array == number}
        if len(places) == 1 and not is_operand:
            (place,) = places
            if place.offset == 0 and math.prod(place.size) * place.dtype.itemsize == made.bytes:
                return place.size, place.stride, place.dtype
        return made.size, made.stride, made.dtype

    def run(self, inputs: list[Tensor]) -> Result:
        """What the recorded call returned, for arrays of the same signature."""
        made, device = self._count - self._inputs, inputs[0].device
        tensors: list[Tensor | None] = [*inputs, *[None] * made]
        addresses = [x.data_ptr() for x in inputs] + [0] * made
        workspace = None
        if self._workspace:
            workspace = allocated(self._workspace, device)
            start = workspace.data_ptr()
            for number, offset, _ in self._parts:
                addresses[number] = start + offset
            if self._is_interpreted:
                for number, offset, size in self._parts:
                    tensors[number] = workspace[offset : offset + size]
        for number, shape, stride, dtype in self._allocated:
            array = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            tensors[number], addresses[number] = array, array.data_ptr()
        stream = _current_stream() if self._is_launched else 0
        arrays = ArraysOfRun(tensors, addresses, stream)
        for step, dropped in zip(self._steps, self._dropped, strict=True):
            step.run(arrays)
            for number in dropped:
                tensors[number] = None
        return _filled(self._result, arrays.at)


def _current_stream() -> int:
    current = driver.active
    stream: int = current.get_current_stream(current.get_current_device())
    return stream


def allocated(size: int, device: torch.device) -> Tensor:
    """A workspace of that many bytes."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def _step(recorded: RecordedLaunch | RecordedOperator) -> Launch | InterpretedLaunch | Operation:
    if isinstance(recorded, RecordedOperator):
        given = recorded.arguments
        arrays = tuple(i for i, each in enumerate(given) if isinstance(each, Place))
        others = [each for each in given if not isinstance(each, Place)], recorded.keywords
        return Operation(recorded, () if any(found_in(others, Place)) else arrays)
    held = recorded.held
    if held is None:
        return InterpretedLaunch(recorded)
    filled = tuple(
        (position, each.array, each.offset)
        for position, each in enumerate(recorded.arguments)
        if isinstance(each, Place)
    )
    arguments = [0 if isinstance(each, Place) else each for each in recorded.arguments]
    x, y, z = (*recorded.grid, 1, 1)[:3]
    return Launch(held, (x, y, z), [*arguments, *held.constants], filled)


def _recorded_result(value: Result, recorder: Recorder) -> Result:
    """A result with places instead of arrays."""
    if isinstance(value, Tensor):
        return recorder.place(value)
    if isinstance(value, tuple):
        return _tuple_like(value, [_recorded_result(each, recorder) for each in value])
    if type(value) is dict:
        return {name: _recorded_result(each, recorder) for name, each in value.items()}
    if value is not None:
        recorder.obstacle = recorder.obstacle or f"it returns a {type(value).__name__}"
    return value


def _filled(value: Value, at: Callable[[Place], Tensor]) -> Value:
    """A structure with arrays instead of places."""
    kind = type(value)
    if kind is Place:
        return at(value)
    if kind is dict:
        return {name: _filled(each, at) for name, each in value.items()}
    if kind is list:
        return [_filled(each, at) for each in value]
    if isinstance(value, tuple):
        return _tuple_like(value, [_filled(each, at) for each in value])
    return value


def _tuple_like(value: tuple[Value, ...], entries: list[Value]) -> Value:
    return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)


def _used_by_operator(step: RecordedLaunch | RecordedOperator) -> set[int]:
    """The numbers of the arrays that one of PyTorch's operators uses, which are tensors."""
    if isinstance(step, RecordedLaunch):
        return set()
    made = {number for number in step.results if number is not None}
    return made | {place.array for place in found_in(step, Place)}


def _last_uses(recorder: Recorder, numbers: set[int], inputs: int) -> list[list[int]]:
    """For each step, the arrays that no later step uses."""
    last = {}
    for at, step in enumerate(recorder.steps):
        for number in {place.array for place in found_in(step, Place)} | _used_by_operator(step):
            if number in numbers and number >= inputs:
                last[number] = at
    return [[n for n, found in last.items() if found == at] for at in range(len(recorder.steps))]
