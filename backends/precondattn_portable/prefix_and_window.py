"""A prefix together with a window: scores of the keys between the two are not computed.

Queries i0 … i1 − 1 attend to the keys of the prefix, before p, and of the window, from a on. If
p < a, these queries are a separate call, whose keys are both ranges, one after the other:

    o[i0:i1] = attention(q[i0:i1], [K[:p], K[a:i1]], [V[:p], V[a:i1]])

Its frame has their positions. The gradient of a key is the sum over these calls.
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn.algebra.declaration import Inputs
from precondattn.arrays import Array, Arrays, Residuals, namespace
from precondattn.frame import Frame
from precondattn_portable.algorithm import AnyAlgorithm
from precondattn_portable.layout import blocks
from precondattn_portable.masks import Mask
from precondattn_portable.sizes import BlockSizes


class PartOfQueries(NamedTuple):
    """Some of a call's queries, and the keys that they attend to."""

    queries: slice
    keys: tuple[slice, ...]

    def frame(self, frame: Frame) -> Frame:
        """The frame of the part."""
        axes: list[dict[str, int]] = [*[{"t": 1}, {"s": 1}] * 3, {"t": 1}, {"t": 2, "s": 3}]
        return Frame(*map(self.taken, frame.arrays, axes))

    def inputs(self, x: Arrays, declared: Inputs) -> Arrays:
        return {name: self.taken(a, axes_of(declared, name)) for name, a in x.items()}

    def taken(self, array: Array | None, axes: dict[str, int]) -> Array | None:
        """The rows of an array, by the axes of queries and of keys that it has."""
        if array is None:
            return None
        if "t" in axes:
            array = array[at(axes["t"], self.queries)]
        if "s" in axes:
            runs = [array[at(axes["s"], run)] for run in self.keys]
            array = namespace(array).concat(runs, axis=axes["s"]) if len(runs) > 1 else runs[0]
        return array

    def add(self, total: Array, part: Array, axes: dict[str, int]) -> None:
        """Add a gradient of the part to that of the call."""
        where = at(axes["t"], self.queries) if "t" in axes else ()
        if "s" not in axes:
            total[(*where, ...)] += part
            return
        axis, start = axes["s"], 0
        for run in self.keys:
            stop = start + run.stop - run.start
            inside = [*where, *[slice(None)] * (axis - len(where))]
            total[(*inside, run, ...)] += part[at(axis, slice(start, stop))]
            start = stop


def at(axis: int, part: slice) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, part)


def axes_of(declared: Inputs, name: str) -> dict[str, int]:
    """The axes of queries and of keys of an input."""
    letters = declared[name].letters
    return {letter: letters.index(letter) for letter in "ts" if letter in letters}


def parts_of(sizes: BlockSizes, mask: Mask, t: int) -> list[PartOfQueries]:
    """The parts of a call of t queries; empty if no block of queries has a wide enough gap.

    Computing the scores in a narrower gap costs less than copies of keys and values.
    """
    rows = list(blocks(t, sizes.rows))
    gaps = [stop - start for start, stop in (mask.between(*each) for each in rows)]
    if max(gaps, default=0) < sizes.rows:
        return []
    return [
        PartOfQueries(slice(*each), tuple(slice(*r) for r in mask.ranges(*each))) for each in rows
    ]


def forward(
    algorithm: AnyAlgorithm, parts: list[PartOfQueries], x: Arrays, frame: Frame
) -> tuple[Array, Residuals]:
    declared, t = algorithm.leaf.inputs, x["q"].shape[1]
    whole: list[Array] = []
    for part in parts:
        out, residuals = algorithm.forward(part.inputs(x, declared), part.frame(frame))
        found = (out, *residuals)
        if not whole:
            whole = [algorithm.ops.zeros((a.shape[0], t, *a.shape[2:]), a) for a in found]
        for total, rows in zip(whole, found, strict=True):
            total[at(1, part.queries)] = rows
    return whole[0], tuple(whole[1:])


def backward(
    algorithm: AnyAlgorithm,
    parts: list[PartOfQueries],
    x: Arrays,
    frame: Frame,
    out: Array,
    residuals: Residuals,
    cotangent: Array,
) -> Arrays:
    declared, xp = algorithm.leaf.inputs, namespace(out)
    total = {name: xp.zeros_like(array) for name, array in x.items()}
    for part in parts:
        rows = at(1, part.queries)
        of_rows = out[rows], tuple(r[rows] for r in residuals), cotangent[rows]
        arguments = part.inputs(x, declared), part.frame(frame)
        for name, gradient in algorithm.backward(*arguments, *of_rows).items():
            part.add(total[name], gradient, axes_of(declared, name))
    return total
