"""Faults of blocked algorithms, and blocks of a few tokens for the carrier of these algorithms.

    rows B ⌊T / B⌋ … T − 1 are not written, or are those of the block before

With small blocks, short sequences have several blocks and a shorter last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import precondattn as pa
from precondattn.algebra.piece import Piece
from precondattn.arrays import Array
from precondattn_conformance.faults.applicable import Named, leaves
from precondattn_conformance.faults.fault import (
    BACKWARD,
    REPLACING,
    STEP,
    STEP_BACKWARD,
    MethodCall,
    MethodResult,
    Truth,
)
from precondattn_conformance.faults.saved import overwritten
from precondattn_portable import (
    extension,
    read_log_mean_exp,
    symmetric_lucid,
    triangular_inverse,
)
from precondattn_portable.sizes import ON_CPU

BLOCK = 4
"""The number of tokens of a block in most algorithms."""

SMALL = (
    (ON_CPU, {"rows": 2 * BLOCK, "fewest_rows": BLOCK, "row_block_entries": 64}),
    (ON_CPU, {"reflections": BLOCK, "chunk": BLOCK, "chunk_entries": 256, "token_entries": 64}),
    (extension, {"TOKENS": 3}),
    (read_log_mean_exp, {"BLOCK": 2 * BLOCK, "ELEMENTS": 3}),
    (symmetric_lucid, {"DIRECT": 2 * BLOCK}),
    (triangular_inverse, {"LEAF": 2}),
)
"""The block sizes of the blocked algorithms: what has them, and their names."""


@contextmanager
def small_blocks() -> Iterator[None]:
    """Context in which the blocked algorithms use blocks of a few tokens."""
    with REPLACING:
        original = [(owner, {n: getattr(owner, n) for n in sizes}) for owner, sizes in SMALL]
        _set(SMALL)
        try:
            yield
        finally:
            _set(original)


def _set(sizes: Iterable[tuple[object, Mapping[str, int]]]) -> None:
    for owner, numbers in sizes:
        for name, number in numbers.items():
            setattr(owner, name, number)


def residual(m: Piece, stage: str) -> Named:
    """Overwrite the logarithms of row sums that blocked attention keeps as residuals."""
    if stage != BACKWARD or not leaves(m, pa.Softmax, pa.Path):
        return
    yield "overwritten by the first gradient", overwritten


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
