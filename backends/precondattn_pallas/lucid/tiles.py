"""Tiles of LUCID's matrix, and the layout of a solve's scratch arrays.

    Φ_ij = e^{s ⟨k̂_i, k̂_j⟩ − s d} ≤ 1,    0 where i and j belong to different segments

Scratch arrays are padded: (m, T, w), with m = b n the heads of all sequences, T the tokens padded
to whole super-blocks, and w padded to whole tiles. Masked tokens and padding have k̂ = 0, v = 0 and
β = 0, so that the kernels need no mask. Tiles without a common segment are not multiplied.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from precondattn.arrays import Array
from precondattn_pallas.arrays import runs_of
from precondattn_pallas.launch import References, divide, loop


class Phi(NamedTuple):
    """The scale, the shift and the products by which Φ is computed from keys."""

    scale: float
    """s log₂ e"""
    shift: float
    """s d log₂ e"""
    products: Array
    """`Products`, or `tpu.products.TpuProducts`"""

    def tile(
        self,
        i_keys: Array,
        i: Array,
        j_keys: Array,
        j: Array,
        i_segments: Array,
        j_segments: Array,
        *,
        channels: int = 128,
    ) -> Array:
        """Φ of rows i and j of references to keys, `channels` of them at a time.

        With several blocks of channels, both tiles are read again for every product.
        """
        width = i_keys.shape[1]
        if width <= channels:
            scores = self.products.dot(i_keys[i, :], j_keys[j, :], right=True)
            return self.weights(scores, _are_equal(i_segments, j_segments))

        def add(index: Array, total: Array) -> Array:
            part = pl.ds(pl.multiple_of(index * channels, channels), channels)
            return total + self.products.dot(i_keys[i, part], j_keys[j, part], right=True)

        scores = loop(0, width // channels, add, jnp.zeros((i.size, j.size), jnp.float32))
        return self.weights(scores, _are_equal(i_segments, j_segments))

    def weights(self, scores: Array, are_equal: Array) -> Array:
        """Φ from ⟨k̂_i, k̂_j⟩ and from the equality of segments, None where all are equal."""
        result = jnp.exp2(scores * self.scale - self.shift)
        return result if are_equal is None else jnp.where(are_equal, result, jnp.float32(0))


class SegmentBounds(NamedTuple):
    """The bounds of each token's segment; padding is a segment of its own."""

    begin: Array
    """(b, T): the first token of the segment, by which it is identified"""
    end: Array
    """(b, T): the last token plus one"""


class SolveInputs(NamedTuple):
    """The inputs of a forward or backward solve."""

    keys: Array
    """k̂ (m, T, key_width)"""
    reciprocal: Array
    """1 / rms (b, s, n)"""
    factor: Array
    """β, and 0 at padding (m, T)"""
    segments: SegmentBounds | None


def segments_of(ids: Array, tokens: int) -> SegmentBounds | None:
    """The segments of ids (b, s), padded to T tokens; equal ids are adjacent."""
    if ids is None:
        return None
    runs, padding = runs_of(ids), tokens - ids.shape[1]

    def found(side: str) -> Array:
        at = jax.vmap(lambda runs: jnp.searchsorted(runs, runs, side=side))(runs)
        return jnp.pad(at.astype(jnp.int32), ((0, 0), (0, padding)), constant_values=tokens)

    return SegmentBounds(found("left"), found("right"))


def of_head(
    array: Array, rows: int | None = None, heads: int | None = None
) -> tuple[Array, pl.BlockSpec]:
    """An array of all heads, with all rows of a program's head as the block, or its tile of rows.

    With a number of heads, an array of all sequences, or of as many heads.
    """
    by, rest = heads and heads // array.shape[0], array.shape[2:]

    def index(i: Array, h: Array, *_: Array) -> tuple[Array, ...]:
        return divide(h, by) if by else h, 0 if rows is None else i, *(0,) * len(rest)

    return array, pl.BlockSpec((None, rows or array.shape[1], *rest), index)


def reach(x: References, start: Array, count: int) -> tuple[Array, Array]:
    """Tokens that share a segment with any of `count` tokens: the first, and the last plus one."""
    return x["segments"][start], x["ends"][start + count - 1]


def _are_equal(i_segments: Array, j_segments: Array) -> Array:
    return None if i_segments is None else i_segments[:, None] == j_segments[None, :]


def of_tile(references: Array, name: str, *index: Array) -> Array:
    """A part of an optional input; None without it."""
    return references[name][index] if name in references else None
