"""LUCID without causality: a symmetric system, solved without storing its matrix.

    (Φ + ρ I) y = v,    Φ_ij = e^{s ⟨k̂_i, k̂_j⟩ − s d},    Φ_ii = 1

Up to `DIRECT` tokens it is solved by a Cholesky factorization of one head at a time. That is exact,
and takes 10 to 17 times as long as softmax attention; the iteration takes 14 to 56 times as long.
Longer sequences, whose matrix would take much memory, are solved by iteration
(`block_conjugate_gradients.py`). A product with Φ is computed one row block at a time, up to the
diagonal: a block Φ_IJ contributes to the rows I, and as Φ_IJᵀ to the rows J,

    z_I += Φ_IJ x_J    (J ≤ I),    z_J += Φ_IJᵀ x_I    (J < I).

An iteration costs as much as softmax attention of the keys to themselves. Backward, x solves the
same system for dy, dv = x, and dk̂ = G k̂ with the symmetric G = −s (x yᵀ + y xᵀ) ∘ Φ off the
diagonal, by row blocks as well.
"""

from __future__ import annotations

from collections.abc import Iterator

import precondattn as pa
from precondattn.arrays import Array, Arrays, Residuals, arange_like, namespace
from precondattn.frame import Frame
from precondattn.spec.array_functions import transpose, where_valid
from precondattn.spec.positive_definite import tolerance_of
from precondattn.spec.rms_norm import rms_norm_vjp
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.arithmetic import Scratch, changed_at
from precondattn_portable.block_conjugate_gradients import solved
from precondattn_portable.layout import Part, Tile, block_size, groups_with_scratch, time_first
from precondattn_portable.lucid_solve import shift_and_factor
from precondattn_portable.masks import Mask

DIRECT = 2048
"""The most tokens of a sequence whose matrix is factorized: 16 MiB in float32."""


class Similarities:
    """Φ of some heads, one row block at a time."""

    def __init__(
        self, of: Algorithm[pa.SymmetricLucidSolve], unit: Array, mask: Mask, workspace: Scratch
    ) -> None:
        self.ops, self.unit, self.mask, self.workspace = of.ops, unit, mask, workspace
        d = unit.shape[3]
        self.scale = of.leaf.scale_for(d)
        self.queries = unit * self.scale
        self.shift, self.factor = shift_and_factor(self.scale * d)
        """Φ is this factor times the tiles."""
        self.own_weight = (1.0 + of.leaf.rho) / self.factor

    def tiles(self) -> Iterator[Tile]:
        """The row blocks, each from the first visible key of its rows to the diagonal."""
        s = self.unit.shape[2]
        return self.mask.tiles_to_diagonal(s, block_size(self.ops.sizes, s))

    def weights(self, tile: Tile, own: float) -> Array:
        """Φ / `factor` of a tile (b, n, i1 − i0, i1 − low), and `own` on the diagonal."""
        ops, (i0, i1, low, _) = self.ops, tile
        keys = transpose(self.unit[tile.keys])
        workspace = self.workspace.shaped((*self.unit.shape[:2], i1 - i0, i1 - low))
        weights = ops.product(self.queries[tile.queries], keys, workspace)
        if self.shift:
            weights = ops.subtract(weights, self.shift)
        weights = ops.exp(weights)
        if not self.mask.is_plain:
            weights = self.mask.apply(ops, weights, tile, 0.0)
        row, corner = arange_like(i1 - i0, weights), (..., slice(i0 - low, None))
        changed_at(ops.keep, weights, corner, row[:, None] != row, own)
        return weights

    def _add(self, total: Array, x: Array, weights: Array, tile: Tile) -> None:
        """total += Φ x of a tile and of its transpose, above the diagonal."""
        i0, _, low, _ = tile
        self.ops.add_product_at(total, tile.queries, weights, x[tile.keys], self.factor)
        if low < i0:
            mirrored, before = transpose(weights[..., : i0 - low]), tile._replace(high=i0).keys
            self.ops.add_product_at(total, before, mirrored, x[tile.queries], self.factor)

    def times(self, x: Array) -> Array:
        """(Φ + ρ I) x"""
        total = self.ops.zeros(x.shape, x)
        for tile in self.tiles():
            self._add(total, x, self.weights(tile, self.own_weight), tile)
        return total

    def pulled(self, x: Array, y: Array) -> Array:
        """dk̂, from the solution x of the gradient and y."""
        ops, xp = self.ops, namespace(x)
        left, right = xp.concat([x, y], axis=-1), xp.concat([y, x], axis=-1)
        total = ops.zeros(self.unit.shape, x)
        for tile in self.tiles():
            weights = self.weights(tile, 0.0)
            pairs = ops.product(left[tile.queries], transpose(right[tile.keys]))
            self._add(total, self.unit, ops.multiply(pairs, weights), tile)
        return -self.scale * total


class SymmetricLucidSolveBlocks(Algorithm[pa.SymmetricLucidSolve]):
    """Algorithm of `SymmetricLucidSolve`."""

    name = "Cholesky or conjugate gradients"

    def _groups(self, unit: Array, frame: Frame) -> Iterator[tuple[Part, Similarities]]:
        s = unit.shape[2]
        mask = Mask(frame.among_keys(s), s, 0, causal=False)
        row_block = (s if s <= DIRECT else block_size(self.ops.sizes, s)) * s
        for part, workspaces in groups_with_scratch(self.ops, unit, row_block):
            arguments = unit[part], mask.of_sequences(part[0]), workspaces[0]
            yield part, Similarities(self, *arguments)

    def _solved(self, phi: Similarities, right: Array) -> Array:
        leaf = self.leaf
        if right.shape[2] <= DIRECT:
            return leaf.solved(leaf.similarities(phi.unit, phi.mask.frame), right)
        return solved(self.ops, phi.times, right, tolerance_of(leaf, right), leaf.iterations)

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        ops = self.ops
        unit = self.leaf.unit_keys(ops.heads_first(x["k"]))
        v = where_valid(ops.heads_first(x["v"]), frame)
        y = ops.empty(v.shape, v)
        for part, phi in self._groups(unit, frame):
            y[part] = self._solved(phi, v[part])
        return time_first(y), ()

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        ops, leaf = self.ops, self.leaf
        k, y = ops.heads_first(x["k"]), where_valid(ops.heads_first(out), frame)
        unit = leaf.unit_keys(k)
        d_y = where_valid(ops.heads_first(cotangent), frame)
        d_v, d_k = ops.empty(y.shape, y), ops.empty(k.shape, y)
        for part, phi in self._groups(unit, frame):
            solution = self._solved(phi, d_y[part])
            d_v[part], d_k[part] = solution, phi.pulled(solution, y[part])
        if leaf.normalize == "keys":
            d_k = rms_norm_vjp(k, leaf.eps, d_k)
        return {"k": time_first(d_k), "v": time_first(d_v)}
