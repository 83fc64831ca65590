"""Faults of the last block, which is shorter than the others.

    rows B ⌊T / B⌋ … T − 1 are not written, or are those of the block before

They are for the blocked carrier, whose B is small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import precondattn as pa
from precondattn.algebra.piece import Piece
from precondattn.arrays import Array
from precondattn_conformance.faults.applicable import Named
from precondattn_conformance.faults.fault import (
    STEP,
    STEP_BACKWARD,
    MethodCall,
    MethodResult,
    Truth,
)
from precondattn_conformance.faults.small_blocks import BLOCK


def block_tail(m: Piece, stage: str) -> Named:
    """Faults for leaves with blocks; a leaf that treats each token alone has none."""
    if all(isinstance(leaf, pa.TokenWise) for leaf in m.program.leaves):
        return
    if stage in (STEP, STEP_BACKWARD):
        return
    yield "not written", partial(_with_tail, _zero)
    yield "that of the block before", partial(_with_tail, _of_block_before)


def _with_tail(
    change: Callable[[Array, int], None], truth: Truth, call: MethodCall
) -> MethodResult:
    result = truth(call)
    if result.out is not None:
        return replace(result, out=_changed(change, result.out))
    patterns = call.declared
    return replace(
        result,
        gradients={
            name: _changed(change, x) if patterns[name].time_axis == 1 else x
            for name, x in result.gradients.items()
        },
    )


def _changed(change: Callable[[Array, int], None], x: Array) -> Array:
    """Change the last block of an array (b, t, …), if it is shorter than the others."""
    start = x.shape[1] - x.shape[1] % BLOCK
    if not 0 < start < x.shape[1]:
        return x
    x = x.copy()
    change(x, start)
    return x


def _zero(x: Array, start: int) -> None:
    x[:, start:] = 0


def _of_block_before(x: Array, start: int) -> None:
    count = x.shape[1] - start
    x[:, start:] = x[:, start - BLOCK : start - BLOCK + count]


OPERATORS = {"block tail": block_tail}
