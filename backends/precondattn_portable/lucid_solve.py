"""LUCID's triangular system, by blocked forward substitution without storing the matrix.

    E y = diag(β) v,    E = diag(δ) + diag(β) stril(Φ),    Φ_ij = e^{s ⟨k̂_i, k̂_j⟩ − shift_i}

where δ = 1 in the normalised forms, and Φ's diagonal otherwise. With β' = β / δ and block rows I,

    y_I = (I + β'_I stril(Φ_II))⁻¹ β'_I (v_I − Σ_{J<I} Φ_IJ y_J).

The diagonal blocks are inverted at once (`triangular_inverse.py`). The sum is a row block of Φ
times the known part of y. Row blocks are two blocks high where that speeds up the products: the
second block then also needs the first block's y. Backward, from the last block to the first, with
R = dy,

    X_J = δ_J⁻¹ (I + β'_J stril(Φ_JJ))⁻ᵀ R_J,    dv_J = β_J X_J,    R_I −= Φ_JIᵀ dv_J    (I < J),
    dS_J = −(dv_J yᵀ) ∘ Φ_J,    dβ_J = X_J · (v_J − stril(Φ)_J y),

where Φ is recomputed, and dS is propagated through the scores and the norm of the keys while Φ_J
is in memory. A step is the same, with the cached keys, y and norms as preceding tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple, cast

import precondattn as pa
from precondattn.arrays import Array, Arrays, Residuals, arange_like, namespace, zero_where_not
from precondattn.cache import Append, Updates
from precondattn.frame import Frame
from precondattn.spec.array_functions import identity_like, row_sum, transpose
from precondattn.spec.metric import DOT
from precondattn.spec.rms_norm import rms, rms_norm_vjp
from precondattn.spec.transported import Transported
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.arithmetic import Arithmetic, Scratch, stored
from precondattn_portable.extension import (
    FilledPart,
    filled,
    new_tokens,
    past_heads,
    step_as_defined,
)
from precondattn_portable.layout import (
    Part,
    Tile,
    block_size,
    blocks,
    budget,
    groups_with_scratch,
    head_groups,
    only_at,
    padded,
    time_first,
    tokens_at,
)
from precondattn_portable.lucid_one_block import (
    has_plain_matrix,
    is_one_block,
    solve_one_block,
    strengths,
    strictly_below,
)
from precondattn_portable.masks import Mask
from precondattn_portable.scores import DotScores, Scores
from precondattn_portable.transported import TransportedScores
from precondattn_portable.triangular_inverse import solve_unit_lower, unit_lower_inverse

FACTORED = 32.0
"""The largest shift that is a factor of products, not subtracted from every score: scores of
normalised keys are at most the shift, and e³² is far from overflow in float32."""


def shift_and_factor(shift: float) -> tuple[float, float]:
    """The shift to subtract from every score, and the factor of products with Φ."""
    return (0.0, math.exp(-shift)) if shift <= FACTORED else (shift, 1.0)


class LucidView(NamedTuple):
    """A call with heads before time, padded to whole blocks."""

    k: Array
    """The keys as passed (b, n, s, d)"""
    unit: Array
    """k̂: the keys divided by their norm"""
    v: Array
    beta: Array | None
    """β (b, n, s, 1), 0 at padding; None where it is 1"""
    w: Array | None
    path_beta: Array | None

    def group(self, part: Part) -> LucidView:
        return LucidView(*[a if a is None else a[part] for a in self])


class LucidMatrix:
    """The matrix of a group of heads, in row blocks of `height` rows in the first workspace."""

    def __init__(
        self,
        ops: Arithmetic,
        leaf: pa.LucidSolve,
        view: LucidView,
        mask: Mask,
        size: int,
        height: int,
        workspaces: list[Scratch],
        *,
        gradient: bool = False,
    ) -> None:
        self.ops, self.view, self.mask, self.size = ops, view, mask, size
        self.height, self.workspaces = height, workspaces
        b, n, s, d = view.k.shape
        xp = namespace(view.k)
        self.scale, self.chunks = leaf.scale_for(d), s // size
        queries = xp.reshape(view.unit * self.scale, (b, n, 1, s, d))
        self.scores: Scores
        # `within` are the scores of every diagonal block.
        if isinstance(leaf.metric, Transported):
            arrays = queries, view.unit, view.w, view.path_beta
            scores = TransportedScores(ops, arrays, size, workspaces[0], gradient=gradient)
            self.scores, within = scores, scores.all.local + 0
        else:
            self.scores = DotScores(ops, queries, view.unit, gradient=gradient)
            keys = xp.reshape(view.unit, (b, n, self.chunks, size, d))
            within = ops.product(keys * self.scale, transpose(keys))
        self.diagonal: Array | None = None
        self.maximum: Array | None = None
        self.at_maximum: Array | None = None
        self.beta = view.beta
        """β' (b, n, s, 1); None where it is 1."""
        if leaf.has_unit_diagonal:
            self.shift, self.factor = shift_and_factor(self.scale * d)
            within = ops.add(within, -self.scale * d)
        else:
            self.shift, self.factor = 0.0, 1.0
            diagonal = xp.reshape(row_sum(within * identity_like(within)), (b, n, s, 1))
            if leaf.normalize == "rows":
                self.maximum, self.at_maximum = self._row_maxima(diagonal)
                diagonal = diagonal - self.maximum
                # Only masked entries exceed 0, and might overflow.
                within = xp.clip(within - self._by_block(self.maximum), max=0.0)
            if view.beta is not None:  # Without an input β it is 1 or, at padding, 0.
                diagonal = xp.where(view.beta > 0, diagonal, 0.0)
            self.diagonal = xp.exp(diagonal)
            one = 1.0 if view.beta is None else view.beta
            self.beta = one / self.diagonal
        # stril(Φ) of every diagonal block (b, n, chunks, size, size)
        below = strictly_below(ops, ops.exp(within), mask.window, mask.frame.k_segment)
        del within  # It is as large as the inverses.
        if self.beta is not None:
            below = below * self._by_block(self.beta)
        self.solves = ops.sizes.few_operations
        self.blocks_or_inverses = below if self.solves else unit_lower_inverse(ops, below)

    def _by_block(self, x: Array) -> Array:
        """(b, n, s, 1) as (b, n, chunks, size, 1)"""
        return namespace(x).reshape(x, (*x.shape[:2], self.chunks, self.size, 1))

    def _row_maxima(self, diagonal: Array) -> tuple[Array, Array]:
        """m_i = max_{j≤i} of the scores (b, n, s, 1), and the first j that attains it."""
        scores, xp = self.scores, namespace(diagonal)
        if isinstance(scores, TransportedScores):
            scores = scores.from_first()
        maxima, positions = [], []
        for tile in self.mask.tiles(diagonal.shape[2], self.size):
            best = diagonal[tile.queries]
            position = arange_like(self.size, diagonal)[:, None] + tile.i0
            position = xp.broadcast_to(position, best.shape)
            if tile.low < tile.high:
                row_block = scores.row_block(tile, self.workspaces[0])
                row_block = self.mask.apply(self.ops, row_block, tile)
                row_max = xp.max(row_block, axis=-1, keepdims=True)
                first = xp.argmax(row_block, axis=-1)[..., None]
                first = xp.astype(first, position.dtype) + tile.low
                is_past = row_max >= best
                best = xp.where(is_past, row_max, best)
                position = xp.where(is_past, first, position)
            maxima.append(best)
            positions.append(position)
        return xp.concat(maxima, axis=2), xp.concat(positions, axis=2)

    def tiles(self) -> list[Tile]:
        """The row blocks, each from its first visible key to its last row."""
        return [*self.mask.tiles_to_diagonal(self.chunks * self.size, self.height)]

    def blocks(self, tile: Tile) -> list[Tile]:
        """The blocks of the rows of a row block, with those of these rows that precede them."""
        starts = range(tile.i0, tile.i1, self.size)
        return [Tile(j0, j0 + self.size, tile.i0, j0) for j0 in starts]

    def solved(
        self, block: Tile, right: Array, out: Array | None = None, *, transposed: bool = False
    ) -> Array:
        """(I + β' stril(Φ))⁻¹ right of the rows of a block, in `out`; or with the transpose."""
        ops, matrix = self.ops, self.blocks_or_inverses[:, :, block.i0 // self.size, ...]
        if self.solves:
            return solve_unit_lower(ops, matrix, right, transposed=transposed)
        return ops.product(transpose(matrix) if transposed else matrix, right, out)

    def weights(self, tile: Tile) -> Array:
        """Φ / `factor` (b, n, i1 − i0, high − low), 0 at masked pairs."""
        ops, row_block = self.ops, self.scores.row_block(tile, self.workspaces[0])
        if self.maximum is not None:
            row_block = ops.add(row_block, -self.maximum[tile.queries])
            row_block = namespace(row_block).clip(row_block, max=0.0)
        elif self.shift:
            row_block = ops.add(row_block, -self.shift)
        return self.mask.apply(ops, ops.exp(row_block), tile, 0.0)

    def without_known(self, right: Array, y: Array, tile: Tile) -> Array:
        """right − Φ y of a tile."""
        if tile.low == tile.high:
            return right
        return self.ops.add_product(right, self.weights(tile), y[tile.keys], -self.factor)


class PastSystem:
    """Φ of new tokens and cached tokens; the cache stores raw keys and their norms."""

    def __init__(
        self, ops: Arithmetic, leaf: pa.LucidSolve, past: Arrays, x: Arrays, known: FilledPart
    ) -> None:
        self.ops, count, xp = ops, known.count, namespace(x["k"])
        d = x["k"].shape[3]
        scale = leaf.scale_for(d)
        self.shift, self.factor = shift_and_factor(scale * d)
        self.new_rms = rms(x["k"], leaf.eps) if leaf.normalize == "keys" else None
        k = x["k"] if self.new_rms is None else x["k"] / self.new_rms
        self.queries = ops.heads_first(k * scale)
        self.keys = past_heads(past["key"], count)
        self.solved = past_heads(past["solved"], count)
        self.rms: Array | None = None
        if leaf.normalize == "keys":
            r = past_heads(past["rms"], count)[:, :, None, :]
            # Empty slots, which are masked, hold 0. A norm is positive (`rms`).
            self.rms = r if known.offset is not None else xp.where(r > 0, r, 1.0)
        self.mask = Mask(known.frame, count, known.offset, window=leaf.window, strict=True)

    def logs(self, scores: Array, part: Part, tile: Tile) -> Array:
        """log Φ − log `factor`, from scores with the keys as stored; in `scores`."""
        if self.rms is not None:
            scores = self.ops.divide(scores, self.rms[part])
        if self.shift:
            scores = self.ops.subtract(scores, self.shift)
        if self.mask.is_plain:
            return scores
        return self.mask.of_sequences(part[0]).apply(self.ops, scores, tile)


class LucidSolveBlocks(Algorithm[pa.LucidSolve]):
    """Algorithm of `LucidSolve`."""

    name = "substitution in blocks"

    @cached_property
    def has_plain_matrix(self) -> bool:
        return has_plain_matrix(self.leaf)

    def _view(self, x: Arrays, frame: Frame, size: int) -> LucidView:
        leaf = self.leaf
        missing = -x["k"].shape[1] % size
        names = ("k", "v", *leaf.metric.inputs)
        inputs = {name: padded(self.ops.heads_first(x[name]), 0, missing) for name in names}
        k = inputs["k"]
        unit = k / rms(k, leaf.eps) if leaf.normalize == "keys" else k
        beta = strengths(self.ops, leaf, x, frame)
        if missing:
            one = namespace(k).ones_like(time_first(x["k"])[..., :1]) if beta is None else beta
            beta = padded(one, 0, missing)
        return LucidView(k, unit, inputs["v"], beta, inputs.get("w"), inputs.get("beta"))

    def _size(self, s: int) -> int:
        """Tokens of a block."""
        sizes = self.ops.sizes
        if isinstance(self.leaf.metric, Transported):
            return sizes.chunk_of_reflections(s)
        return block_size(sizes, s)

    def _systems(
        self, view: LucidView, frame: Frame, *, gradient: bool = False
    ) -> Iterator[tuple[Part, LucidMatrix]]:
        leaf, s = self.leaf, view.k.shape[2]
        size = self._size(s)
        mask = Mask(self._padded_frame(frame, s), s, 0, window=leaf.window, strict=True)
        height = size * self._blocks_per_row_block(size, s, gradient=gradient)
        most = self.ops.sizes.lucid_entries
        groups = groups_with_scratch(self.ops, view.k, height * s, most, gradient=gradient)
        for part, workspaces in groups:
            group, group_mask = view.group(part), mask.of_sequences(part[0])
            given = (self.ops, leaf, group, group_mask, size, height, workspaces)
            yield part, LucidMatrix(*given, gradient=gradient)

    def _blocks_per_row_block(self, size: int, s: int, *, gradient: bool) -> int:
        """One with transported scores, or where the several row blocks of a gradient are long."""
        is_long = 2 * size * s > budget(self.ops.sizes.row_block_entries)
        is_transported = isinstance(self.leaf.metric, Transported)
        return 1 if is_transported or self.ops.sizes.few_operations or (gradient and is_long) else 2

    def _padded_frame(self, frame: Frame, s: int) -> Frame:
        """The frame in which keys attend to keys, with the padding to whole blocks."""
        count = frame.k_position.shape[1]
        frame = frame.among_keys(count)
        # Padding has β = 0. Its scores can matter only for a row maximum.
        valid = frame.k_valid if self.leaf.normalize == "rows" else None
        if s == count:
            return frame.replaced(q_valid=None, k_valid=valid)
        position = arange_like(s, frame.k_position)[None, :]
        if valid is not None:
            valid = padded(valid, 0, s - count, axis=1)
        segment = frame.k_segment
        if segment is not None:
            last = [segment[:, -1:]] * (s - count)
            segment = namespace(segment).concat([segment, *last], axis=1)
        return Frame(position, position, None, valid, segment, segment)

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        ops = self.ops
        if self.has_plain_matrix and is_one_block(ops, x):
            return solve_one_block(ops, self.leaf, x, frame), ()
        s = x["k"].shape[1]
        view = self._view(x, frame, self._size(s))
        y = ops.empty(view.v.shape, view.v)
        for part, system in self._systems(view, frame):
            solution, v = y[part], system.view.v
            for tile in system.tiles():
                before = tile._replace(high=tile.i0)
                right = system.without_known(v[tile.queries] + 0, solution, before)
                for block in system.blocks(tile):
                    rhs = right[:, :, block.i0 - tile.i0 : block.i1 - tile.i0, :]
                    rhs = system.without_known(rhs, solution, block)
                    if system.beta is not None:
                        rhs = system.beta[block.queries] * rhs
                    view = solution[block.queries]
                    stored(solution, block.queries, view, system.solved(block, rhs, view))
        return time_first(y)[:, :s, ...], ()

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        ops, leaf, s = self.ops, self.leaf, x["k"].shape[1]
        view = self._view(x, frame, self._size(s))
        missing = view.k.shape[2] - s
        y = padded(ops.heads_first(out), 0, missing)
        right = padded(ops.heads_first(cotangent), 0, missing) + 0
        d = LucidView(*[None if a is None else ops.zeros(a.shape, a) for a in view])
        for part, system in self._systems(view, frame, gradient=True):
            of_group = d.group(part)
            for tile in reversed(system.tiles()):
                d_v, d_beta = self._pull_rows(system, tile, y[part], right[part])
                of_group.v[tile.queries] = d_v
                if of_group.beta is not None and leaf.beta:
                    of_group.beta[tile.queries] = d_beta
            gradients = system.scores.gradients()
            d.unit[part] = gradients["q"][:, :, 0, ...] * system.scale + gradients["k"]
            if d.w is not None and d.path_beta is not None:
                d.w[part], d.path_beta[part] = gradients["w"], gradients["beta"]
        d_k = d.unit if leaf.normalize != "keys" else rms_norm_vjp(view.k, leaf.eps, d.unit)
        result = {"k": d_k, "v": d.v}
        if d.w is not None:
            result |= {"w": d.w, "beta": d.path_beta}
        if leaf.beta:
            result["lucid_beta"] = cast("Array", d.beta)[..., 0]
        return {name: time_first(a)[:, :s, ...] for name, a in result.items()}

    def _pull_rows(
        self, system: LucidMatrix, tile: Tile, y: Array, right: Array
    ) -> tuple[Array, Array]:
        """dv and dβ of a row block; updates earlier right sides and the scores' gradient."""
        ops, view, (i0, _, low, _) = self.ops, system.view, tile
        solved = ops.empty(view.v[tile.queries].shape, right)
        d_v = solved if view.beta is None else ops.empty(solved.shape, right)
        for block in reversed(system.blocks(tile)):
            here = tokens_at(block.i0 - i0, block.i1 - i0)
            x = system.solved(block, right[block.queries], transposed=True)
            if system.diagonal is not None:
                x = x / system.diagonal[block.queries]
            solved[here] = x
            if view.beta is not None:
                d_v[here] = view.beta[block.queries] * x
            if i0 < block.i0:
                row_block = transpose(system.weights(block))
                ops.add_product_at(right, block.keys, row_block, d_v[here], -system.factor)
        weights = system.weights(tile)
        known = y[tile.keys]
        d_beta: Array = None
        if self.leaf.beta:
            residual = ops.add_product(view.v[tile.queries] + 0, weights, known, -system.factor)
            d_beta = row_sum(solved * residual)
        if low < i0:
            earlier = transpose(weights[..., : i0 - low])
            ops.add_product_at(right, tokens_at(low, i0), earlier, d_v, -system.factor)
        workspace = system.workspaces[1].shaped(weights.shape)
        d_row_block = ops.product(d_v * -system.factor, transpose(known), workspace)
        d_row_block = ops.multiply(d_row_block, weights)
        if system.diagonal is not None:
            d_row_block = d_row_block + self._of_diagonal(system, tile, d_v, y)
        system.scores.pull(tile, d_row_block)
        return d_v, d_beta

    def _of_diagonal(self, system: LucidMatrix, tile: Tile, d_v: Array, y: Array) -> Array:
        """The gradient of the scores through δ and through the row maximum."""
        i0, i1, low, _ = tile
        column = arange_like(i1, y)[low:]
        is_diagonal = column == arange_like(i1, y)[i0:i1, None]
        assert system.diagonal is not None
        d_diagonal = row_sum(d_v * y[tile.queries]) * system.diagonal[tile.queries]
        d_row_block = zero_where_not(is_diagonal, -d_diagonal)
        if system.at_maximum is not None and not self.leaf.detach_max:
            first = system.at_maximum[tile.queries] == column
            d_maximum = row_sum(d_v * system.view.v[tile.queries])
            d_row_block = d_row_block + zero_where_not(first, d_maximum)
        return d_row_block

    def step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        ops, leaf = self.ops, self.leaf
        if leaf.metric != DOT or not leaf.has_unit_diagonal or frame.is_traced:
            return step_as_defined(leaf, past, x, frame)
        known = filled(frame, past["key"].shape[1])
        new = PastSystem(ops, leaf, past, x, known)
        v = ops.heads_first(x["v"])
        right, (b, n, t, _) = ops.empty(v.shape, v), v.shape
        size = block_size(ops.sizes, t)
        for part in head_groups(ops.sizes, b, n, size * max(known.count, 1)):
            for i0, i1 in blocks(t, size):
                rhs = v[part][:, :, i0:i1, :]
                if known.count:
                    tile, keys = Tile(i0, i1, 0, known.count), transpose(new.keys[part])
                    scores = ops.product(new.queries[part][tile.queries], keys)
                    weights = ops.exp(new.logs(scores, part, tile))
                    rhs = ops.add_product(rhs + 0, weights, new.solved[part], -new.factor)
                right[part][:, :, i0:i1, :] = rhs
        y = self.among_new(x, right, known, frame)
        updates: Updates = {"key": Append(x["k"]), "solved": Append(y)}
        if new.new_rms is not None:
            updates["rms"] = Append(new.new_rms[..., 0])
        return y, updates

    def among_new(self, x: Arrays, right: Array, known: FilledPart, frame: Frame) -> Array:
        """y of new tokens (b, t, n, e), from v minus the contribution of the cache (b, n, t, e)."""
        t = right.shape[2]
        right = time_first(right)
        if t > 1:
            return self.forward({**x, "v": right}, new_tokens(frame, t))[0]
        # The matrix of one token is its diagonal.
        y = x["lucid_beta"][..., None] * right if self.leaf.beta else right
        return only_at(frame.valid_keys(t), y) if known.offset is None else y
