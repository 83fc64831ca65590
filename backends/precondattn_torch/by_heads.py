"""A call on a CPU by several threads, each of which computes some of the heads.

Blocked algorithms are hundreds of short products and exponentials. If PyTorch divides each of them
among its threads, each ends with a wait for the slowest thread. If another process is busy, that is
a wait for the operating system, and a call takes ten times as long. Heads are independent: here
they are divided once, and every thread computes some of them without waiting for the others.

Key/value heads are divided with the query heads that read them. A single key/value head is read by
every thread, and its gradient is the sum of the threads' gradients. If the arrays of one head are
large, all threads together would need too much memory; then PyTorch divides each product instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import gcd
from threading import Barrier
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from precondattn.algebra.declaration import HEADS, Pattern
from precondattn.algebra.piece import Piece
from precondattn.arrays import Arrays, Residuals
from precondattn.backend import ArraySpec
from precondattn.frame import Frame
from precondattn.frameworks.torch.modes import only_computes
from precondattn.spec.transported import Transported
from precondattn_portable.algorithm import Algorithm, AnyAlgorithm
from precondattn_portable.layout import SHARING
from precondattn_portable.sizes import BlockSizes

R = TypeVar("R")

LEAST = 2**19
"""The least size of the largest input for which the division saves time."""

MOST = 2**23
"""The largest array in a head's gradient, which has several such: 32 MiB in float32."""


class Division(NamedTuple):
    """The division of a call's heads into parts."""

    count: int  # type: ignore[assignment]  # No method of a tuple is called.
    """The number of parts"""
    axes: Mapping[str, int | None]
    """The axis of the heads of each input; None if one head serves all"""
    of_out: int
    """The axis of the heads of the output"""

    def part(self, x: Arrays, part: int) -> Arrays:
        """The inputs of a part."""
        return {
            name: array if (axis := self.axes[name]) is None else self.slice(array, axis, part)
            for name, array in x.items()
        }

    def frame(self, frame: Frame, part: int) -> Frame:
        """The frame of a part, whose heads may have different masks."""
        if frame.pairs is None or frame.pairs.shape[1] == 1:
            return frame
        return frame.replaced(pairs=self.slice(frame.pairs, 1, part))

    def slice(self, array: Tensor, axis: int, part: int) -> Tensor:
        size = array.shape[axis] // self.count
        return array.narrow(axis, part * size, size)


class ByHeads(Algorithm[Piece]):
    """An algorithm, applied to some of the heads by each thread."""

    def __init__(self, whole: AnyAlgorithm) -> None:
        super().__init__(whole.ops, whole.leaf)
        self.whole, self.name = whole, whole.name
        for method in ("step", "step_backward", "residual_shapes", "states_between"):
            if hasattr(whole, method):
                setattr(self, method, getattr(whole, method))

    def forward(self, x: Arrays, frame: Frame) -> tuple[Tensor, Residuals]:
        division = division_of(self.leaf, x)
        if division is None:
            return self.whole.forward(x, frame)

        def forward(part: int) -> tuple[Tensor, Residuals]:
            return self.whole.forward(division.part(x, part), division.frame(frame, part))

        outs, kept = zip(*in_threads(forward, division.count), strict=True)
        of_residuals = self._axes_of_residuals(x, division)
        parts_of_each = zip(zip(*kept, strict=True), of_residuals, strict=True)
        residuals = tuple(torch.cat(parts, axis) for parts, axis in parts_of_each)
        return torch.cat(outs, division.of_out), residuals

    def backward(
        self, x: Arrays, frame: Frame, out: Tensor, residuals: Residuals, cotangent: Tensor
    ) -> Arrays:
        division = None if _is_large(self.ops.sizes, self.leaf, x) else division_of(self.leaf, x)
        if division is None:
            return self.whole.backward(x, frame, out, residuals, cotangent)
        # PyTorch's own attention returns no residuals.
        of_residuals = self._axes_of_residuals(x, division) if residuals else ()

        def backward(part: int) -> Arrays:
            kept = zip(residuals, of_residuals, strict=True)
            return self.whole.backward(
                division.part(x, part),
                division.frame(frame, part),
                division.slice(out, division.of_out, part),
                tuple(division.slice(array, axis, part) for array, axis in kept),
                division.slice(cotangent, division.of_out, part),
            )

        results = in_threads(backward, division.count)
        gradients = {}
        for name in [*results[0]]:
            # Parts are freed as they are joined. Gradients of an input without heads are summed.
            parts, axis = [of.pop(name) for of in results], division.axes[name]
            gradients[name] = sum(parts[1:], parts[0]) if axis is None else torch.cat(parts, axis)
        return gradients

    def _axes_of_residuals(self, x: Arrays, division: Division) -> list[int]:
        """The head axis of each residual: the axis that is shorter for a part."""
        whole, part = (
            self.residual_shapes({name: ArraySpec.of(array) for name, array in arrays.items()})
            for arrays in (x, division.part(x, 0))
        )
        axes = []
        for of_whole, of_part in zip(whole, part, strict=True):
            (axis,) = (i for i, n in enumerate(of_whole.shape) if n != of_part.shape[i])
            axes.append(axis)
        return axes


def division_of(leaf: Piece, x: Arrays) -> Division | None:
    """The division of a call's heads; None if the call is not divided."""
    threads = torch.get_num_threads()
    if threads == 1:
        return None
    largest = max(x.values(), key=Tensor.numel)
    if largest.numel() < LEAST or not largest.is_cpu:
        return None
    if leaf.numbers_heads or leaf.mixes_sequences or not only_computes():
        return None
    if any(type(array) not in (Tensor, torch.nn.Parameter) for array in x.values()):
        return None
    axes = {name: _head_axis(leaf.inputs[name]) for name in x}
    heads = {name: x[name].shape[axis] for name, axis in axes.items() if axis is not None}
    axes |= {name: None for name, count in heads.items() if count == 1}
    several, of_out = [n for n in heads.values() if n != 1], _head_axis(leaf.program.output)
    if not several or of_out is None:
        return None
    count = max(n for n in range(1, threads + 1) if gcd(*several) % n == 0)
    return None if count == 1 else Division(count, axes, of_out)


def _head_axis(pattern: Pattern) -> int | None:
    return next((i for i, axis in enumerate(pattern.axes) if axis.letter in HEADS), None)


def _is_large(sizes: BlockSizes, leaf: Piece, x: Arrays) -> bool:
    """Whether the gradient of one head has arrays too large for all threads at once.

    With reflections, these are the matrices of all chunks, and the scores of a chunk with all keys.
    """
    if not isinstance(getattr(leaf, "metric", None), Transported):
        return False
    s = x["k"].shape[1]
    is_large: bool = sizes.chunk_of_reflections(s) * s > MOST
    return is_large


def in_threads(function: Callable[[int], R], count: int) -> list[R]:
    """function(0), … function(count − 1), each in another thread."""
    # Grad mode is per thread.
    mode = torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad

    def computed(part: int) -> R:
        with mode():
            return function(part)

    threads = _threads(os.getpid(), count, torch.get_num_threads() // count)
    return list(threads.map(computed, range(count)))


@cache
def _threads(process: int, count: int, each: int) -> ThreadPoolExecutor:
    """A pool of threads that each use `each` threads of PyTorch; one per (forked) process."""
    whole = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, "precondattn", _start, (count, each))
    barrier = Barrier(count)
    list(pool.map(lambda part: barrier.wait(), range(count)))  # Now all threads have started.
    torch.set_num_threads(whole)  # Threads that start later use all.
    return pool


def _start(count: int, each: int) -> None:
    """Initialise a thread of the pool: `each` threads of PyTorch, and one of `count` shares."""
    torch.set_num_threads(each)
    # A thread reads the process-wide number at its first query, which has to be now.
    torch.get_num_threads()
    SHARING.count = count
