"""The plan of one LUCID solve: sizes, dtypes and configurations, from the arrays of a call.

Inputs in half precision, float16 or bfloat16, are computed in float16: Φ ≤ 1, keys have norm √d,
and float16 has 3 more bits than bfloat16. Keys that the solve does not normalise itself have no
known norm, and are computed in float32 (tf32 on a GPU).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from precondattn.kernel_backend.limits import padded_width
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.metric import DOT
from precondattn_triton.configurations import Configuration, configuration
from precondattn_triton.precision import product_precision, sixteen_bits

LOG2_E = math.log2(math.e)
WIDEST_CHUNK = 128
"""The largest number of channels of v in a program."""

FIRST_BLOCK = 32
"""Tokens of the blocks that are inverted in registers."""

ENOUGH_SOLVERS = 64
"""Programs of `substitute` from which on wider blocks of channels are better than more programs:
they read the matrix less often, and a program waits for its own rows whatever its width."""

NARROWEST_SOLVER, WIDEST_SOLVER = 32, 64
"""Channels of v in a program of `substitute`."""

GROUP = 3
"""Super-blocks whose products with all tokens solved before the group are one launch."""


class UpdateStep(NamedTuple):
    """A launch of `update`, and the super-block that `substitute` solves after it.

    Sums of the group's rows begin with those of its first launch, to which the others add.
    """

    start: int
    """The first token of the super-block."""
    group: int
    """The first token of its group."""
    rows: range
    """The rows of P: all those of the group in its first launch, then those of the super-block."""
    columns: range
    """Columns of P: the tokens solved before the group, then those solved before within it."""
    is_first: bool
    """Whether it is the first launch of the group."""


class LucidPlan(NamedTuple):
    """The sizes of one call, and the configurations of its kernels."""

    b: int
    s: int
    n: int
    d: int
    e: int
    tokens: int
    """s, padded to whole tiles of every kernel."""
    unit: int
    """Tokens of the largest tile."""
    super_block: int
    """S, in PaTH's metric a power of two"""
    key_width: int
    solver: int
    """Channels of v in a program of `substitute`."""
    chunk: int
    """Channels of v in a program of the other kernels."""
    chunks: int
    step: int
    """Channels of a row of the workspace."""
    scale: float
    half: bool
    """Whether factors of products have 16 bits."""
    dtype: torch.dtype
    precision: str
    inverse: Configuration
    update: Configuration
    joint: Configuration
    """The configuration of `update` with key sums."""
    gradient: Configuration
    reflections: Configuration
    """The configuration of chunks in PaTH's metric."""

    @property
    def first_block(self) -> int:
        return self.inverse.rows if self.inverse.rows <= FIRST_BLOCK else self.inverse.rows // 2

    @property
    def path_chunk(self) -> int:
        """Tokens of a chunk of reflections; no tile has rows of two chunks."""
        return max(self.reflections.rows, self.first_block)

    @property
    def heads(self) -> int:
        return self.b * self.n

    @property
    def score_factors(self) -> tuple[float, float]:
        """s and s d, in units of log 2."""
        return self.scale * LOG2_E, self.scale * self.d * LOG2_E

    @property
    def super_blocks(self) -> range:
        return range(0, self.tokens, self.super_block)

    @property
    def group_rows(self) -> int:
        """The rows of a group of super-blocks."""
        return min(GROUP, len(self.super_blocks)) * self.super_block


def update_steps(
    tokens: int, size: int, *, backward: bool, cached: int = 0
) -> Iterator[UpdateStep]:
    """The launches of a solve with super-blocks of `size` tokens, in their order.

    The group that is solved first may be smaller than the others. Forward, y of the first `cached`
    tokens may be known; they are whole super-blocks.
    """
    blocks = -(-(tokens - cached) // size)
    smaller = 0 if backward else -blocks % GROUP
    groups = [range(first, first + GROUP) for first in range(-smaller, blocks, GROUP)]
    for group in reversed(groups) if backward else groups:
        begin = cached + max(group.start, 0) * size
        starts = range(begin, min(cached + group.stop * size, tokens), size)
        end = starts.stop
        rows, columns = range(begin, end), range(end, tokens) if backward else range(begin)
        first = starts[-1 if backward else 0]
        for start in reversed(starts) if backward else starts:
            if start != first:
                rows = range(start, min(start + size, tokens))
                columns = range(rows.stop, end) if backward else range(begin, start)
            yield UpdateStep(start, begin, rows, columns, start == first)


def plan_of(leaf: LucidSolve, k: Tensor, v: Tensor) -> LucidPlan:
    b, s, n, d = k.shape
    e = v.shape[3]
    half = k.dtype.itemsize == 2 and leaf.normalize == "keys"
    key_width = padded_width(d)
    chunk = min(padded_width(e), WIDEST_CHUNK)
    chunks = -(-e // chunk)
    widest = max(key_width, chunk)
    inverse, update, joint, gradient = (
        configuration(f"lucid_{name}", widest, half, k)
        for name in ("inverse", "update", "update_with_sums", "gradient")
    )
    reflections = configuration("path_chunks", key_width, half, k)
    unit = max(inverse.rows, *update[:2], *joint[:2], *gradient[:2])
    if leaf.metric != DOT:
        unit = max(unit, reflections.rows)
    tokens = -(-s // unit) * unit
    super_block = super_block_of(tokens, inverse.columns, unit)
    solver = min(chunk, NARROWEST_SOLVER)
    while solver < min(chunk, WIDEST_SOLVER) and b * n * -(-e // (2 * solver)) >= ENOUGH_SOLVERS:
        solver *= 2
    if leaf.metric != DOT:
        # A tile of rows and a super-block of columns have one border, if S is a power of two.
        super_block = 1 << (super_block.bit_length() - 1)
        # Scores of square tiles have one border.
        update = update._replace(columns=min(*update[:2], inverse.rows))
    precision = sixteen_bits() if half else product_precision(k.dtype)
    return LucidPlan(
        b, s, n, d, e, tokens, unit, super_block, key_width, solver, chunk, chunks, chunk * chunks,
        leaf.scale_for(d), half, torch.float16 if half else torch.float32, precision,
        inverse, update, joint, gradient, reflections,
    )  # fmt: skip


def super_block_of(tokens: int, least: int, unit: int) -> int:
    """S, 2^k or 3 · 2^k: `least`, or for many tokens at most √(0.4 × least × tokens).

    Φ of a super-block takes S² numbers per head, as much as 0.4 `least` numbers per token, and
    `substitute` reads S numbers per token. There are two launches for each super-block: their
    number and the reads grow alike, with the square root of the number of tokens. S is a multiple
    of `unit`, a power of two.
    """
    most = math.isqrt(2 * least * tokens // 5)
    size = 1 << (max(most, 1).bit_length() - 1)
    if 3 * size // 2 <= most and size // 2 >= unit:
        size = 3 * size // 2
    return min(max(size, least, unit), 1 << (tokens - 1).bit_length())
