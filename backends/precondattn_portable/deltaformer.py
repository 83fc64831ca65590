"""DeltaFormer, one block of rows at a time: its solve and its read share one map.

With P the strict causal softmax of the scores S, λ_t = log Σ_{j<t} e^{S_tj} and w = P u,

    u_t = v_t − β_t w_t,    o_t = a_t w_t + (1 − a_t) u_t,    a_t = 1 / (1 + e^{S_tt − λ_t}),

since causal softmax is P with one more column. So a row block of P is computed once. Its part
before the block reads u of earlier tokens; its diagonal part is the matrix of the block's own u,

    (I + β_I P_II) u_I = v_I − β_I Σ_{J<I} P_IJ u_J.

Backward, from the last block to the first, with R_I the sum of what later blocks read of u_I:

    (I + β_I P_II)ᵀ x_I = R_I + (1 − a_I) do_I + P_IIᵀ (a_I do_I),    c_I = a_I do_I − β_I x_I,
    R_J += P_IJᵀ c_I    (J < I),    dv = x,    dβ = −x·w,
    dS = P ∘ (c uᵀ − δ),    δ = a (do·o) − β (x·w),    dS_tt = (1 − a_t) do_t·(u_t − o_t).

Each product serves both maps, so that the work is that of attention. Saved are w and λ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import precondattn as pa
from precondattn.arrays import Array, Arrays, Index, Residuals, namespace
from precondattn.backend import ArraySpec
from precondattn.cache import Append, Updates
from precondattn.frame import Frame
from precondattn.spec.array_functions import (
    finite_or_zero,
    repeat_heads,
    row_sum,
    sum_heads,
    transpose,
)
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.arithmetic import Arithmetic, changed_at
from precondattn_portable.extension import filled, past_heads, step_as_defined
from precondattn_portable.layout import (
    Part,
    Tile,
    block_size,
    head_groups,
    time_first,
    tokens_at,
    zero_padding,
)
from precondattn_portable.masks import Mask
from precondattn_portable.triangular_inverse import solve_unit_lower


class WeightRows:
    """Scores, P and the weights 1 − a of blocks of rows; arrays have h heads before time."""

    def __init__(
        self, ops: Arithmetic, leaf: pa.DeltaFormer, x: Arrays, mask: Mask, past: int = 0
    ) -> None:
        self.ops, self.mask, self.past = ops, mask, past
        """`past` keys of a cache precede the tokens of x."""
        h, self.scale = x["q"].shape[2], leaf.scale_for(x["q"].shape[3])
        self.q = ops.heads_first(x["q"] * self.scale)
        self.k = repeat_heads(ops.heads_first(x["k"]), h)
        self.v = repeat_heads(ops.heads_first(x["v"]), h)
        self.beta = ops.heads_first(x["beta"])[..., None]
        self.own_scores = row_sum(self.q * self.k)
        """S_tt (b, h, t, 1), −∞ if key t is masked"""
        valid = mask.frame.q_valid
        if valid is not None:
            self.own_scores = namespace(self.own_scores).where(
                valid[:, None, :, None], self.own_scores, -math.inf
            )

    def groups(self) -> Iterator[tuple[Part, list[Tile]]]:
        """Groups of heads and their tiles, whose keys end with the last row."""
        b, h, t, _ = self.q.shape
        sizes = self.ops.sizes
        size = block_size(sizes, t)
        tiles = [*self.mask.tiles_to_diagonal(t, size, self.past)]
        for part in head_groups(sizes, b, h, size * (self.past + t)):
            yield part, tiles

    def scores(self, part: Part, tile: Tile, past_k: Array | None = None) -> Array:
        """Masked scores of a tile; its keys are those of the cache, and then the tokens of x."""
        xp, rows = namespace(self.q), self.q[part][tile.queries]
        new = self.k[part][tokens_at(max(tile.low - self.past, 0), tile.high - self.past)]
        block = self.ops.product(rows, transpose(new))
        if past_k is not None and self.past:
            block = xp.concat([self.ops.product(rows, transpose(past_k)), block], axis=-1)
        return self.mask.of_sequences(part[0]).apply(self.ops, block, tile)

    def own_weight(self, part: Part, queries: Index, log_total: Array) -> Array:
        """1 − a (b, h, rows, 1), from λ."""
        xp, own_score = namespace(log_total), self.own_scores[part][queries]
        has_keys = own_score > -math.inf
        gap = xp.where(has_keys, own_score, 0.0) - xp.where(has_keys, log_total, 0.0)
        return xp.where(has_keys, 0.5 + 0.5 * xp.tanh(0.5 * gap), 0.0)


class DeltaFormerBlocks(Algorithm[pa.DeltaFormer]):
    """Algorithm of `DeltaFormer`."""

    name = "substitution in blocks"

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        t = x["k"].shape[1]
        frame = frame.among_keys(t)
        rows = WeightRows(self.ops, self.leaf, x, Mask(frame, t, 0, strict=True))
        o, w, _, log_total = self._solved(rows)
        out = zero_padding(time_first(o), frame)
        return out, (time_first(w), time_first(log_total[..., 0]))

    def _solved(
        self, rows: WeightRows, past_k: Array | None = None, past_u: Array | None = None
    ) -> tuple[Array, Array, Array, Array]:
        """o, w, u and λ of all rows."""
        ops, xp = self.ops, namespace(rows.q)
        o, w, u = (
            ops.time_first(rows.v.shape, rows.v, 2),
            *(ops.empty(rows.v.shape, rows.v) for _ in "wu"),
        )
        log_totals = ops.empty((*u.shape[:3], 1), u)
        for part, tiles in rows.groups():
            keys = None if past_k is None else past_k[part]
            for tile in tiles:
                i0, queries, block = tile.i0, tile.queries, rows.scores(part, tile, keys)
                largest = finite_or_zero(xp.max(block, axis=-1, keepdims=True))
                block = ops.exp(ops.subtract(block, largest))
                total = row_sum(block)
                has_keys = total > 0
                total = xp.where(has_keys, total, 1.0)
                log_total = xp.where(has_keys, largest + xp.log(total), -math.inf)
                of_earlier, first = (
                    ops.zeros(u[part][queries].shape, u),
                    max(tile.low - rows.past, 0),
                )
                start = rows.past + i0 - first
                if past_u is not None and rows.past:
                    of_earlier = ops.add_product(of_earlier, block[..., : rows.past], past_u[part])
                if first < i0:
                    earlier = u[part][:, :, first:i0, :]
                    of_earlier = ops.add_product(of_earlier, block[..., rows.past : start], earlier)
                of_earlier = of_earlier / total
                weights, beta = block[..., start:] / total, rows.beta[part][queries]
                right = rows.v[part][queries] - beta * of_earlier
                solved = solve_unit_lower(ops, beta * weights, right)
                weighted = ops.add_product(of_earlier, weights, solved)
                u[part][queries], w[part][queries] = solved, weighted
                log_totals[part][queries] = log_total
            own_weight = rows.own_weight(part, (...,), log_totals[part])
            o[part] = (1.0 - own_weight) * w[part] + own_weight * u[part]
        return o, w, u, log_totals

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        ops, (t, n) = self.ops, x["k"].shape[1:3]
        frame = frame.among_keys(t)
        rows = WeightRows(ops, self.leaf, x, Mask(frame, t, 0, strict=True))
        w = ops.heads_first(residuals[0])
        log_totals = ops.heads_first(residuals[1])[..., None]
        o, d_o = (ops.heads_first(zero_padding(a, frame)) for a in (out, cotangent))
        u = rows.v - rows.beta * w
        d_u, d_v = ops.zeros(u.shape, u), ops.empty(u.shape, u)
        d_q, d_k = ops.empty(rows.q.shape, u), ops.zeros(rows.q.shape, u)
        d_beta = ops.empty(rows.beta.shape, u)
        for part, tiles in rows.groups():
            for tile in reversed(tiles):
                i0, low, tokens = tile.i0, tile.low, tile.queries
                log_total = log_totals[part][tokens]
                own_weight = rows.own_weight(part, tokens, log_total)
                block = rows.scores(part, tile)
                block = ops.exp(ops.subtract(block, finite_or_zero(log_total)))
                weights, earlier = block[..., i0 - low :], transpose(block[..., : i0 - low])
                beta, d_rows = rows.beta[part][tokens], d_o[part][tokens]
                d_weighted = (1.0 - own_weight) * d_rows
                right = (
                    d_u[part][tokens]
                    + own_weight * d_rows
                    + ops.product(transpose(weights), d_weighted)
                )
                solved = solve_unit_lower(ops, beta * weights, right, transposed=True)
                d_v[part][tokens] = solved
                d_strength = -row_sum(solved * w[part][tokens])
                d_beta[part][tokens] = d_strength
                combined = d_weighted - beta * solved
                if low < i0:
                    ops.add_product_at(d_u[part], tokens_at(low, i0), earlier, combined)
                mean = row_sum(d_rows * o[part][tokens])
                d_scores = ops.product(combined, transpose(u[part][tile.keys]))
                d_scores = ops.subtract(d_scores, (1.0 - own_weight) * mean + beta * d_strength)
                d_scores = ops.multiply(d_scores, block)
                d_own = own_weight * (row_sum(d_rows * u[part][tokens]) - mean)
                keys, queries = rows.k[part], rows.q[part][tokens]
                d_rows = d_own * keys[tokens]
                d_q[part][tokens] = ops.add_product(d_rows, d_scores, keys[tile.keys])
                ops.add_product_at(d_k[part], tile.keys, transpose(d_scores), queries)
                changed_at(ops.add, d_k[part], tokens, d_own * queries)
        return {
            "q": time_first(d_q * rows.scale),
            "k": time_first(sum_heads(d_k, n)),
            "v": time_first(sum_heads(d_v, n)),
            "beta": time_first(d_beta[..., 0]),
        }

    def step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        if frame.is_traced:
            return step_as_defined(self.leaf, past, x, frame)
        t, h = x["q"].shape[1:3]
        cached = filled(frame, past["key"].shape[1])
        mask = Mask(cached.frame.among_keys(t), cached.count + t, cached.offset, strict=True)
        rows = WeightRows(self.ops, self.leaf, x, mask, cached.count)
        past_k = repeat_heads(past_heads(past["key"], cached.count), h)
        o, _, u, _ = self._solved(rows, past_k, past_heads(past["solved"], cached.count))
        updates: Updates = {"key": Append(x["k"]), "solved": Append(time_first(u))}
        return zero_padding(time_first(o), mask.frame), updates

    def residual_shapes(self, inputs: Mapping[str, ArraySpec]) -> tuple[ArraySpec, ...]:
        (b, s, h, _), dtype = inputs["q"]
        dtype = dtype if dtype == "float64" else "float32"
        w = ArraySpec((b, s, h, inputs["v"].shape[3]), dtype)
        return w, ArraySpec((b, s, h), dtype)
