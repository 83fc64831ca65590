"""How one solve of LUCID's is cut: sizes, dtypes and configurations, from a call's arrays.

Half precision is computed in float16, whatever the inputs are: Φ ≤ 1, keys have norm √d, and
float16 has 3 more bits than bfloat16. Keys that come normalised by somebody else are not trusted to
be so, and are computed in float32 (tf32 on a GPU).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from precondattn.spec.metric import DOT
from precondattn_triton.configurations import Configuration, configuration
from precondattn_triton.precision import padded_width, product_precision, sixteen_bits

LOG2_E = math.log2(math.e)
WIDEST_CHUNK = 128
"""Channels of values that a program takes at once."""

FIRST_BLOCK = 32
"""Tokens of the blocks that are inverted in registers."""


class Plan(NamedTuple):
    """Sizes of one call, and how its kernels are cut."""

    b: int
    s: int
    n: int
    d: int
    e: int
    tokens: int
    """s, filled up to whole tiles of every kernel."""
    super_block: int
    key_width: int
    chunk: int
    chunks: int
    step: int
    """Channels of a row of scratch."""
    scale: float
    half: bool
    """Whether products are of 16 bits."""
    dtype: torch.dtype
    precision: str
    inverse: Configuration
    update: Configuration
    gradient: Configuration
    reflections: Configuration
    """Of PaTH's chunks, where the metric is its own."""

    @property
    def first_block(self) -> int:
        return min(FIRST_BLOCK, self.inverse.rows)

    @property
    def path_chunk(self) -> int:
        """Tokens of a chunk of reflections: no tile has rows of two."""
        return max(self.reflections.rows, self.first_block)

    @property
    def heads(self) -> int:
        return self.b * self.n

    @property
    def score_factors(self) -> tuple[float, float]:
        """s and s d for powers of two."""
        return self.scale * LOG2_E, self.scale * self.d * LOG2_E

    @property
    def super_blocks(self) -> range:
        return range(0, self.tokens, self.super_block)


def plan_of(leaf: Any, k: Tensor, v: Tensor) -> Plan:
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
    super_block = max(unit, min(inverse.columns, 1 << (tokens - 1).bit_length()))
    precision = sixteen_bits() if half else product_precision(k.dtype)
    return Plan(
        b, s, n, d, e, tokens, super_block, key_width, chunk, chunks, chunk * chunks,
        leaf.scale_for(d), half, torch.float16 if half else torch.float32, precision,
        inverse, update, gradient, reflections,
    )  # fmt: skip
