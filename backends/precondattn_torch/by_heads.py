"""A call on a CPU by several threads, each of which computes some of the heads.

Blocked algorithms are hundreds of short products and exponentials. If PyTorch divides each of them
among its threads, then each ends with a wait for the slowest thread. Next to another busy process
that is a wait for the operating system, and a call takes ten times as long. Heads are independent:
here they are divided once, and every thread computes its own without waiting for the others.

Key/value heads are divided with the query heads that read them. Where there is one of them, every
thread reads it, and its gradient is the sum of theirs. Where the arrays of one head are large,
threads would need them all at once; there PyTorch divides its products, which are large too.
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
from precondattn.arrays import Arrays, Residuals, only_computes
from precondattn.backend import ArraySpec
from precondattn.frame import Frame
from precondattn.spec.transported import Transported
from precondattn_portable.algorithm import Algorithm, AnyAlgorithm
from precondattn_portable.layout import SHARING, chunk_size

R = TypeVar("R")

LEAST = 2**19
"""Elements of the largest input from which threads are worth their start."""

MOST = 2**23
"""Entries of an array of a head's gradient, of which it has several: 32 MiB in float32."""


class Division(NamedTuple):
    """How the heads of a call are divided."""

    count: int  # type: ignore[assignment]  # No method of a tuple is called.
    """Of parts"""
    axes: Mapping[str, int | None]
    """The axis of the heads of each input; None where there is one head for all."""
    of_out: int
    """That of the output"""

    def part(self, x: Arrays, part: int) -> Arrays:
        """The inputs of some of the heads."""
        return {
            name: array if (axis := self.axes[name]) is None else self.slice(array, axis, part)
            for name, array in x.items()
        }

    def frame(self, frame: Frame, part: int) -> Frame:
        """The frame of some of the heads, where they have masks of their own."""
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
        division = None if _is_large(self.leaf, x) else division_of(self.leaf, x)
        if division is None:
            return self.whole.backward(x, frame, out, residuals, cotangent)
        # PyTorch's own attention has kept none.
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
            # Parts are freed as they are joined. What every part has read has the sum of theirs.
            parts, axis = [of.pop(name) for of in results], division.axes[name]
            gradients[name] = sum(parts[1:], parts[0]) if axis is None else torch.cat(parts, axis)
        return gradients

    def _axes_of_residuals(self, x: Arrays, division: Division) -> list[int]:
        """The axis of the heads of each residual: the one that is shorter with fewer heads."""
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
    """How the heads of a call are divided; None where it is computed as one."""
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


def _is_large(leaf: Piece, x: Arrays) -> bool:
    """Whether the gradient of a head has arrays that threads should not have at once.

    With reflections it is computed from matrices of every chunk, and a chunk's scores with all
    keys.
    """
    if not isinstance(getattr(leaf, "metric", None), Transported):
        return False
    s = x["k"].shape[1]
    is_large: bool = chunk_size(s) * s > MOST
    return is_large


def in_threads(function: Callable[[int], R], count: int) -> list[R]:
    """function(0), … function(count − 1), each in a thread of its own."""
    # The mode belongs to a thread.
    mode = torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad

    def computed(part: int) -> R:
        with mode():
            return function(part)

    threads = _threads(os.getpid(), count, torch.get_num_threads() // count)
    return list(threads.map(computed, range(count)))


@cache
def _threads(process: int, count: int, each: int) -> ThreadPoolExecutor:
    """Threads that compute with `each` threads of PyTorch. A forked process has its own."""
    whole = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, "precondattn", _start, (count, each))
    barrier = Barrier(count)
    list(pool.map(lambda part: barrier.wait(), range(count)))  # All of them are started.
    torch.set_num_threads(whole)  # For threads that start later.
    return pool


def _start(count: int, each: int) -> None:
    """In each thread: it computes with `each` threads of PyTorch, as one of `count`."""
    torch.set_num_threads(each)
    # A thread takes the number of the whole process when it first asks for it, which is here.
    torch.get_num_threads()
    SHARING.count = count
