"""JAX: which axes of a method's arrays are independent sequences and heads.

Sequences of a batch are independent, and so are key/value heads, each with the query heads that
share it. If there is one key/value head, the query heads are independent, and each needs it.

A text has a letter for each axis of an array: `b` for sequences, `h` for independent heads, others
for all other axes. An axis of size 1 is never independent. Heads are not if their output depends on
their index, and no axis is if outputs depend on other sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax

from precondattn.algebra.declaration import HEADS as HEAD_LETTERS
from precondattn.algebra.declaration import Pattern
from precondattn.algebra.piece import Piece
from precondattn.arrays import Array, ByName, Tree

BATCH, HEADS = "b", "h"
INDEPENDENT = BATCH + HEADS
OTHER = "."
NUMBERED = "#"
"""The letter of heads that depend on their index, and of heads and sequences that depend on each
other."""

NO_MESH = jax.sharding.AbstractMesh((), ())


def axes_of(mechanism: Piece, verb: str, forward: Callable[..., Tree], arrays: Tree) -> Tree:
    """The axes of a method's arguments: trees like `arrays`, with a text for each array."""
    inputs, frame = arrays[:2] if verb in ("forward", "backward") else arrays[1:3]
    declared = _DeclaredAxes(mechanism, inputs)
    of_inputs = {name: declared.axes(mechanism.inputs[name], a) for name, a in inputs.items()}
    of_frame = jax.tree.map(declared.axes_of_mask, frame)
    of_call = (of_inputs, of_frame)
    if verb == "forward":
        return of_call
    if verb == "backward":
        *_, out, residuals, _ = arrays
        of_out = declared.axes(mechanism.program.output, out)
        if not jax.tree.leaves(residuals):
            return (*of_call, of_out, residuals, of_out)
        _, of_residuals = axes_of_results(forward, (inputs, frame), of_call)
        return (*of_call, of_out, of_residuals, of_out)
    slots = mechanism.program.slots
    of_past = {name: declared.axes(slots[name][1], a) for name, a in arrays[0].items()}
    if verb == "step":
        return (of_past, *of_call)
    of_out = declared.axes(mechanism.program.output, arrays[3])
    return (of_past, *of_call, of_out, of_past)


class _DeclaredAxes:
    def __init__(self, mechanism: Piece, inputs: ByName) -> None:
        mixes = mechanism.mixes_sequences
        self.batch = NUMBERED if mixes else BATCH
        self.heads = NUMBERED if mixes or mechanism.numbers_heads else HEADS
        self.sequences = 1
        for name, array in inputs.items():
            sizes = dict(zip(mechanism.inputs[name].letters, array.shape, strict=True))
            self.sequences = max(self.sequences, sizes.get(BATCH, 1))

    def axes(self, pattern: Pattern, array: Array) -> str:
        return "".join(map(self._letter, pattern.letters, array.shape))

    def _letter(self, letter: str, size: int) -> str:
        if letter == BATCH:
            return self.batch if size > 1 else OTHER
        if letter in HEAD_LETTERS:
            return self.heads if size > 1 else OTHER
        return letter

    def axes_of_mask(self, array: Array) -> str:
        """The axes of a frame's array, which is (b or 1, tokens) or (b or 1, h or 1, t, s)."""
        batch = self.batch if array.shape[0] == self.sequences > 1 else OTHER
        return batch + "t" if array.ndim == 2 else f"{batch}{self._letter('h', array.shape[1])}ts"


def axes_of_results(function: Callable[..., Tree], arrays: Tree, axes: Tree) -> Tree:
    """The axes of a function's results, found by which of them grow with the arguments' axes."""
    shapes = _shapes_of_results(function, arrays)
    grown = {
        letter: _shapes_of_results(function, jax.tree.map(partial(_doubled, letter), arrays, axes))
        for letter in dict.fromkeys("".join(jax.tree.leaves(axes)))
        if is_independent(letter)
    }

    def of_result(result: Array, *others: Array) -> str:
        letters = ""
        for axis, size in enumerate(result.shape):
            each = zip(grown, others, strict=True)
            by = [letter for letter, other in each if other.shape[axis] == 2 * size]
            letters += by[0] if by else OTHER
        return letters

    return jax.tree.map(of_result, shapes, *grown.values())


def _shapes_of_results(function: Callable[..., Tree], arrays: Tree) -> Tree:
    with jax.sharding.use_abstract_mesh(NO_MESH):  # Shapes without shardings.
        return jax.eval_shape(function, *arrays)


def is_independent(letter: str) -> bool:
    """Whether an axis is of sequences or heads, or a digit: an axis over which `vmap` maps."""
    return letter in INDEPENDENT or letter.isdigit()


def _doubled(letter: str, array: Array, axes: str) -> Tree:
    shape = tuple(2 * n if a == letter else n for a, n in zip(axes, array.shape, strict=True))
    return jax.ShapeDtypeStruct(shape, array.dtype)
