"""The plan of one LUCID solve: sizes, dtypes and configurations, from the arrays of a call.

Inputs in half precision, float16 or bfloat16, are computed in float16: Φ ≤ 1, keys have norm √d,
and float16 has 3 more bits than bfloat16. Keys that the solve does not normalise itself have no
known norm, and are computed in float32 (tf32 on a GPU).
"""

from __future__ import annotations

import math
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


class LucidPlan(NamedTuple):
    """The sizes of one call, and the configurations of its kernels."""

    b: int
    s: int
    n: int
    d: int
    e: int
    tokens: int
    """s, padded to whole tiles of every kernel."""
    super_block: int
    """S, a power of two"""
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


def plan_of(leaf: LucidSolve, k: Tensor, v: Tensor) -> LucidPlan:
    b, s, n, d = k.shape
    e = v.shape[3]
    half = k.dtype.itemsize == 2 and leaf.normalize == "keys"
    key_width = padded_width(d)
    chunk = min(padded_width(e), WIDEST_CHUNK)
    chunks = -(-e // chunk)
    widest = max(key_width, chunk)
    inverse, update, gradient = (
        configuration(f"lucid_{name}", widest, half, k)
        for name in ("inverse", "update", "gradient")
    )
    reflections = configuration("path_chunks", key_width, half, k)
    unit = max(inverse.rows, *update[:2], *gradient[:2])
    if leaf.metric != DOT:
        unit = max(unit, reflections.rows)
    tokens = -(-s // unit) * unit
    super_block = max(unit, super_block_of(tokens, inverse.columns))
    solver = min(chunk, NARROWEST_SOLVER)
    while solver < min(chunk, WIDEST_SOLVER) and b * n * -(-e // (2 * solver)) >= ENOUGH_SOLVERS:
        solver *= 2
    if leaf.metric != DOT:
        # Scores of square tiles have one border.
        update = update._replace(columns=min(*update[:2], inverse.rows))
    precision = sixteen_bits() if half else product_precision(k.dtype)
    return LucidPlan(
        b, s, n, d, e, tokens, super_block, key_width, solver, chunk, chunks, chunk * chunks,
        leaf.scale_for(d), half, torch.float16 if half else torch.float32, precision,
        inverse, update, gradient, reflections,
    )  # fmt: skip


def super_block_of(tokens: int, least: int) -> int:
    """S, a power of two: `least`, or for many tokens about √(least / 2 × tokens).

    Φ of a super-block takes S² numbers per head, as much as `least` / 2 numbers per token, and
    `substitute` reads S numbers per token. There are two launches for each super-block: their
    number and the reads grow alike, with the square root of the number of tokens.
    """
    root = math.isqrt(least * tokens // 2)
    size = max(least, 1 << (root.bit_length() - 1))
    return min(size, 1 << (tokens - 1).bit_length())
