"""DeltaFormer, which JAX can differentiate any number of times (`lower_system.py`).

(I + β P) u = v,    o = a P u + (1 − a) u
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array, lax

import precondattn as pa
from precondattn.arrays import Tree
from precondattn.frame import Frame
from precondattn_jax.deltaformer import Tiles
from precondattn_jax.loops import DIFFERENTIABLE
from precondattn_jax.lower_system import joined, products, solved
from precondattn_jax.read_mean import MeanRead


class DeltaFormerRows:
    """The system of u: W is the strict softmax P = e^{S − λ}."""

    def __init__(self, tiles: Tiles, log_totals: Array) -> None:
        self.tiles, self.log_totals = tiles, log_totals
        self.blocks, self.mask = tiles.blocks, tiles.mask

    def start(self, a: Array) -> Array:
        return a

    def carried(self, x: Array, j: Array) -> Array:
        return x

    def preceding(self, x: Array, a: Array, j: Array) -> Array:
        return jnp.exp(self.tiles.scores(a, j) - self.blocks.take(self.log_totals, a))

    def among(self, a: Array) -> Array:
        tile = self.tiles.scores(a, a, diagonal=True)
        return jnp.exp(tile - self.blocks.take(self.log_totals, a))

    def strength(self, a: Array) -> Array | float:
        return self.blocks.take(self.tiles.beta, a)

    def diagonal(self, a: Array) -> Array | float:
        return 1.0


def _log_totals(tiles: Tiles) -> tuple[Array, Array]:
    """λ of every row (b, h, s, 1), 0 without keys, and whether it has keys."""
    blocks, read = tiles.blocks, MeanRead()

    def of_block(a: Array) -> tuple[Array, Array]:
        values = blocks.take(tiles.beta, a)  # Any of width 1: the sum of weights is wanted.

        def add(i: Array, state: Tree) -> Tree:
            return read.add(state, tiles.scores(a, a - 1 - i), values)

        state = read.start(values.shape, values)
        state = read.add(state, tiles.scores(a, a, diagonal=True), values)
        state = DIFFERENTIABLE.counted(blocks.keys, a - tiles.mask.first(a), add, state)
        return read.finish(state)[1], state.total > 0

    log_totals, some = DIFFERENTIABLE.each(of_block, blocks.rows)
    return joined(log_totals), joined(some)


def output(leaf: pa.DeltaFormer, x: Mapping[str, Array], frame: Frame) -> Array:
    """o (b, s, h, e)"""
    tiles, constant = Tiles(leaf, x, frame), Tiles(leaf, lax.stop_gradient(dict(x)), frame)
    log_totals, some = _log_totals(tiles)
    rows = DeltaFormerRows(tiles, log_totals)
    u = solved(rows, DeltaFormerRows(constant, lax.stop_gradient(log_totals)), tiles.v)
    log_totals = jnp.where(some, log_totals, -jnp.inf)
    own = joined(
        lax.map(lambda a: tiles.own_weight(a, tiles.blocks.take(log_totals, a)), tiles.blocks.rows)
    )
    return tiles.tokens((1.0 - own) * products(rows, u) + own * u)
