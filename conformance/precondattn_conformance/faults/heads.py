"""Faults of the head map: which key/value head a query head reads.

head i reads ⌊i n / h⌋,    not i mod n,    nor that of its neighbour
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from precondattn.algebra.declaration import Pattern
from precondattn.algebra.piece import Piece
from precondattn.arrays import Array, Arrays, namespace
from precondattn_conformance.faults.applicable import Named
from precondattn_conformance.faults.fault import (
    BACKWARD,
    STEP_BACKWARD,
    MethodCall,
    MethodResult,
    Truth,
)

GROUPED = (("h", "n"), ("u", "h"))
"""Axes of heads, each with the axis of the smaller number of heads that they share."""


def head_map(m: Piece, stage: str) -> Named:
    """Heads that read the wrong keys and values.

    This applies to mechanisms whose heads share an input; a norm or a temperature is separate per
    head.
    """
    for many, few in GROUPED:
        letters = {letter for pattern in m.inputs.values() for letter in pattern.letters}
        if {many, few} <= letters:
            yield "taken modulo their number", partial(_modulo, many, few)
            yield "each its neighbour's", partial(_neighbours, few)
            if stage in (BACKWARD, STEP_BACKWARD):
                yield "the gradient of one head for that of its group", partial(_one_of, many, few)


def _size(call: MethodCall, letter: str) -> int:
    sizes: list[int] = [
        call.inputs[name].shape[pattern.letters.index(letter)]
        for name, pattern in call.declared.items()
        if letter in pattern.letters
    ]
    return max(sizes)


def _taken(x: Array, pattern: Pattern, letter: str, order: np.ndarray) -> Array:
    """x with its heads in another order, if it has that axis."""
    if x is None or letter not in pattern.letters:
        return x
    axis = pattern.letters.index(letter)
    if x.shape[axis] != len(order):
        return x  # Shared by all heads.
    return namespace(x).take(x, namespace(x).asarray(order), axis=axis)


def _modulo(many: str, few: str, truth: Truth, call: MethodCall) -> MethodResult:
    """Reorder heads so that head i reads key/value head i mod n, and undo it in the results."""
    count, shared = _size(call, many), _size(call, few)
    group = count // shared
    position = np.asarray([i % shared * group + i // shared for i in range(count)])
    reordered = _reordered(call, many, np.argsort(position))
    return _put_back(truth(reordered), call, many, position)


def _reordered(call: MethodCall, letter: str, order: np.ndarray) -> MethodCall:
    inputs, buffers = call.declared, _patterns_of_buffers(call)

    def taken(arrays: Arrays, patterns: dict[str, Pattern]) -> Arrays:
        return {name: _taken(x, patterns[name], letter, order) for name, x in arrays.items()}

    return replace(
        call,
        inputs=taken(call.inputs, dict(inputs)),
        past=taken(call.past, buffers),
        d_buffers=taken(call.d_buffers, buffers),
        out=_taken(call.out, call.output, letter, order),
        cotangent=_taken(call.cotangent, call.output, letter, order),
    )


def _put_back(
    result: MethodResult, call: MethodCall, letter: str, order: np.ndarray
) -> MethodResult:
    inputs, buffers = call.declared, _patterns_of_buffers(call)
    return MethodResult(
        _taken(result.out, call.output, letter, order),
        result.residuals,
        {
            name: type(update)(*(_taken(x, buffers[name], letter, order) for x in update))
            for name, update in result.updates.items()
        },
        {name: _taken(x, inputs[name], letter, order) for name, x in result.gradients.items()},
        {name: _taken(x, buffers[name], letter, order) for name, x in result.d_past.items()},
    )


def _patterns_of_buffers(call: MethodCall) -> dict[str, Pattern]:
    return {name: Pattern.read(slot.pattern) for name, slot in call.slots.items()}


def _neighbours(few: str, truth: Truth, call: MethodCall) -> MethodResult:
    order = np.roll(np.arange(_size(call, few)), 1)
    patterns = call.declared
    moved = {
        name: _taken(x, patterns[name], few, order)
        for name, x in call.inputs.items()
        if name in ("k", "v")
    }
    return truth(call.with_inputs(**moved))


def _one_of(many: str, few: str, truth: Truth, call: MethodCall) -> MethodResult:
    """The gradient of a shared array, from the first head of each group only."""
    count, group = _size(call, many), _size(call, many) // _size(call, few)
    axis = call.output.letters.index(many)
    shape = [1] * call.cotangent.ndim
    shape[axis] = count
    is_first = (np.arange(count) % group == 0).reshape(shape)
    xp = namespace(call.cotangent)
    of_first = truth(replace(call, cotangent=xp.where(xp.asarray(is_first), call.cotangent, 0.0)))
    true = truth(call)
    shared = {
        name: of_first.gradients[name]
        for name, pattern in call.declared.items()
        if few in pattern.letters and name in ("k", "v", "q") and many not in pattern.letters
    }
    return replace(true, gradients={**true.gradients, **shared})
