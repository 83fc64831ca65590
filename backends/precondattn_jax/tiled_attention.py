"""Softmax attention in tiles, as flash attention, for every metric and read.

    forward:   S = s ⟨q, k⟩ (capped) + decay + bias, −∞ at masked pairs;  read S (`read_mean.py`, …)
    backward:  recompute S from q and k;  dS from the read;  then through bias, decay and scores.

The metric is the dot product or PaTH's. The read is what is computed from S and v: the weighted
mean, or LASER's log-mean-exp. Residuals: λ, the log-sum-exp of each row, which includes a sink. The
outer loop iterates over blocks of queries, the inner loop over the tiles they attend to: forward
from the nearest to the first, backward from the first to the nearest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array, lax

from precondattn.arrays import Arrays, Tree, dtype_name
from precondattn.frame import Frame
from precondattn.spec.array_functions import sum_to, swap_time_and_heads
from precondattn.spec.distance import INPUTS
from precondattn.spec.laser import LOG_MEAN_EXP, RANGE
from precondattn.spec.metric import DOT
from precondattn.spec.read import MEAN_AND_LOG_SUM
from precondattn.spec.softmax import SoftmaxAttention, sink_vjp
from precondattn_jax.arithmetic import zeros
from precondattn_jax.distance import ByDistance
from precondattn_jax.dot_scores import CappedScores, Sums
from precondattn_jax.forget_gate import ForgetGate
from precondattn_jax.layout import REFLECTIONS, BlockedCall, QueryBlocks, heads_first
from precondattn_jax.loops import PLAIN, Loops
from precondattn_jax.masks import Mask
from precondattn_jax.read_log_mean_exp import LogMeanExpRead, is_narrow
from precondattn_jax.read_mean import MeanAndLogSumRead, MeanRead, ReadRows
from precondattn_jax.transported_scores import scores_of
from precondattn_portable.layout import grouped_bias, zero_padding

Reads = MeanRead | LogMeanExpRead


def read_of(leaf: SoftmaxAttention, x: Arrays) -> Reads:
    """The read of a leaf, with its sinks."""
    if leaf.read == LOG_MEAN_EXP:
        return LogMeanExpRead()
    read = MeanAndLogSumRead if leaf.read == MEAN_AND_LOG_SUM else MeanRead
    return read(x["sink"] if leaf.sink else None)


class Bias:
    """A bias of scores (b or 1, n or 1, r or 1, t, s)."""

    def __init__(self, blocks: QueryBlocks, bias: Array) -> None:
        self.blocks, self.all = blocks, blocks.of_keys(blocks.of_queries(bias), 4)

    def _at(self, x: Array, a: Array, j: Array) -> Array:
        return self.blocks.take(self.blocks.take(x, a - self.blocks.first, 3), j, 4)

    def add_to(self, tile: Array, a: Array, j: Array, *, diagonal: bool) -> Array:
        """Scores (b, n, r, C, C) plus the bias."""
        return tile + self._at(self.all, a, j)

    def sums(self) -> Array:
        return zeros(self.all.shape, self.all)

    def pulled(self, sums: Array, a: Array, j: Array, d_tile: Array, *, diagonal: bool) -> Array:
        """The sums plus the gradient from that of a tile (b, n, r, C, C)."""
        index = self._at(sums, a, j)
        a = a - self.blocks.first
        rows = self.blocks.take(sums, a, 3)
        rows = self.blocks.put(rows, j, index + sum_to(d_tile, index.shape), 4)
        return self.blocks.put(sums, a, rows, 3)

    def gradient(self, sums: Array) -> Array:
        before = self.blocks.before
        return sums[:, :, :, before : before + self.blocks.t, : self.blocks.s]


class TiledAttention(BlockedCall[SoftmaxAttention]):
    """A full call of `Softmax` or `Path`, split into blocks."""

    def __init__(
        self, leaf: SoftmaxAttention, x: Arrays, frame: Frame, loops: Loops = PLAIN
    ) -> None:
        super().__init__(leaf, x, frame, most=None if leaf.metric == DOT else REFLECTIONS)
        self.loops, blocks = loops, self.blocks
        self.mask = Mask(
            frame,
            blocks,
            causal=leaf.causal,
            window=leaf.window,
            of_queries=leaf.bias,
            heads=self.n,
        )
        q = self.stacked(x["q"]) * leaf.scale_for(self.d)
        self.scores = scores_of(self, q, self.of_keys("k"))
        if leaf.softcap is not None:
            self.scores = CappedScores(blocks, q, self.scores.k, leaf.softcap)
        # Padding repeats the last value, so that it does not widen the range of values.
        after = ((0, 0), (0, 0), (0, blocks.after), (0, 0))
        self.v = jnp.pad(heads_first(x["v"]), after, mode="edge")
        self.added: dict[str, ForgetGate | Bias | ByDistance] = {}
        """The terms that are added to the scores of tiles, by the names of their inputs"""
        if leaf.forget != "none":
            g = self.of_keys("g")
            g = jnp.reshape(g, (self.b, self.n, self.r, g.shape[-1]))
            self.added["g"] = ForgetGate(blocks, g, leaf._gate_scale(self.d))
        if leaf.bias:
            self.added["bias"] = Bias(blocks, grouped_bias(x["bias"], self.n))
        if leaf.distance != "none":
            self.added[INPUTS[leaf.distance]] = ByDistance(leaf, x, blocks, self.n)

    def _masked(self, tile: Array, a: Array, j: Array, *, diagonal: bool = False) -> Array:
        """Scores of a tile plus decay and bias, −∞ at masked pairs."""
        if self.added:
            pairs = self._pairs(tile)
            for each in self.added.values():
                pairs = each.add_to(pairs, a, j, diagonal=diagonal)
            tile = jnp.reshape(pairs, tile.shape)
        return self.mask.apply(tile, a, j, diagonal=diagonal)

    def _pairs(self, tile: Array) -> Array:
        """(b, n, r C, C) as (b, n, r, C, C)."""
        return jnp.reshape(tile, (self.b, self.n, self.r, self.blocks.size, self.blocks.size))

    # ------------------------------------------------------------------------------ forward

    def outputs(
        self, read: Reads, v: Array, before: Callable[[Array, Tree], Tree] | None = None
    ) -> tuple[Array, Array]:
        """Outputs (blocks, b, n, r C, e) and λ (blocks, b, n, r C, 1).

        `before(a, state)` reads, for block a, keys outside the call.
        """
        scores, mask, blocks = self.scores, self.mask, self.blocks

        def of_block(a: Array) -> tuple[Array, Array]:
            def add(state: Tree, tile: Array, j: Array, *, diagonal: bool = False) -> Tree:
                tile = self._masked(tile, a, j, diagonal=diagonal)
                return read.add(state, tile, blocks.take(v, j))

            state: Tree = read.start((*scores.q.shape[1:4], v.shape[3]), v)
            if before is not None:
                state = before(a, state)
            if mask.has_diagonal:
                state = add(state, scores.diagonal(a), a, diagonal=True)
            for first, stop in mask.ranges(a):
                state = scores.over(a, first, stop, add, state, self.loops)
            return read.finish(state)

        out, log_total = self.loops.each(of_block, blocks.rows)
        return out, log_total

    def forward(self) -> tuple[Array, Array]:
        """The output (b, t, h, e), and λ (b, t, h)."""
        if self.leaf.read == LOG_MEAN_EXP:
            o, log_total = lax.cond(
                is_narrow(self.v),
                self._of_exponentials,
                lambda v: self.outputs(LogMeanExpRead(), v),
                self.v,
            )
        else:
            o, log_total = self.outputs(read_of(self.leaf, self.x), self.v)
        out = self.blocks.unstacked(o, self.r)
        return zero_padding(out, self.frame), self.blocks.unstacked(log_total, self.r)[..., 0]

    def _of_exponentials(self, v: Array) -> tuple[Array, Array]:
        """ν + log of the mean of e^{v − ν}."""
        shift = jnp.max(lax.stop_gradient(v), axis=2, keepdims=True)
        mean, log_total = self.outputs(MeanRead(), jnp.exp(v - shift))
        has_mean = mean != 0
        return jnp.where(
            has_mean, shift[None] + jnp.log(jnp.where(has_mean, mean, 1.0)), 0.0
        ), log_total

    # ----------------------------------------------------------------------------- backward

    def _pulled(self, read: Reads, v: Array, rows: ReadRows) -> Sums:
        """The gradients of stacked queries, keys, values, and the other inputs."""
        scores, mask, blocks = self.scores, self.mask, self.blocks

        def of_block(totals: Tree, a: Array) -> tuple[Tree, Array]:
            own_rows = ReadRows(*(blocks.row(stack, a) for stack in rows))

            def of_tile(totals: Tree, tile: Array, j: Array, *, diagonal: bool = False) -> Tree:
                """The sums plus a tile's part for all but the scores, and the tile's gradient."""
                tile = self._masked(tile, a, j, diagonal=diagonal)
                d_tile, d_v = read.pull(tile, blocks.take(v, j), own_rows)
                totals = totals | {"v": blocks.add(totals["v"], j, d_v)}
                for name, each in self.added.items():
                    pairs = self._pairs(d_tile)
                    totals[name] = each.pulled(totals[name], a, j, pairs, diagonal=diagonal)
                return totals, d_tile

            def pull(first: Array, trail: Array, i: Array, carry: Tree) -> Tree:
                totals, y = carry
                j = first + i
                tile = scores.tile(scores.on_trail(trail, j), j)
                totals, d_tile = of_tile(totals, tile, j)
                totals["scores"], y = scores.pulled(totals["scores"], trail, y, j, d_tile)
                return totals, y

            y = zeros(scores.q.shape[1:], scores.q)
            for first, stop in mask.ranges(a):
                step = partial(pull, first, scores.trail(a, first))
                totals, y = lax.fori_loop(0, stop - first, step, (totals, y))
            if mask.has_diagonal:
                totals, d_tile = of_tile(totals, scores.diagonal(a), a, diagonal=True)
                totals["scores"], y = scores.pulled_diagonal(totals["scores"], a, y, d_tile)
            return totals, y

        added = {name: each.sums() for name, each in self.added.items()}
        totals = {"scores": scores.sums(), "v": zeros(v.shape, v), **added}
        totals, d_q = lax.scan(of_block, totals, blocks.rows)
        gradients = {name: each.gradient(totals[name]) for name, each in self.added.items()}
        return {"q": d_q, "v": totals["v"], **scores.gradients(totals["scores"]), **gradients}

    def backward(self, out: Array, log_total: Array, cotangent: Array) -> Arrays:
        """The gradient of every input."""
        d_o = zero_padding(cotangent, self.frame)
        of_nothing = self.x["sink"][None, None] if self.leaf.sink else 0
        is_empty = (log_total == of_nothing)[..., None] & jnp.all(out == 0, axis=-1, keepdims=True)
        # A norm after the attention divides by almost 0 in rows without visible keys.
        d_o = jnp.where(is_empty & ~jnp.isfinite(d_o), 0.0, d_o)
        if self.frame.q_valid is not None:
            # The output of a padded query is 0, whatever its scores are, so its weights are 0.
            log_total = jnp.where(self.frame.q_valid[:, :, None], log_total, math.inf)
        # Rows before the first query have weights of 0.
        log_totals = self.stacked(log_total[..., None], math.inf)
        rows = ReadRows(log_totals, self.stacked(out), self.stacked(d_o))
        if self.leaf.read == LOG_MEAN_EXP:
            result = lax.cond(
                is_narrow(self.v),
                self._pulled_exponentials,
                lambda v, rows: self._pulled(LogMeanExpRead(), v, rows),
                self.v,
                rows,
            )
        else:
            result = self._pulled(read_of(self.leaf, self.x), self.v, rows)
        gradients = {"q": self.blocks.unstacked(result.pop("q"), self.r)}
        gradients["q"] = gradients["q"] * self.leaf.scale_for(self.d)
        if "bias" in result:
            gradients["bias"] = jnp.reshape(result.pop("bias"), self.x["bias"].shape)
        if "g" in result:
            d_g = result.pop("g")
            gradients["g"] = self.tokens(jnp.reshape(d_g, (self.b, -1, d_g.shape[3])))
        if self.leaf.distance != "none":
            name = INPUTS[self.leaf.distance]
            gradients[name] = result.pop(name)
        gradients |= {name: self.tokens(d) for name, d in result.items()}
        if self.leaf.sink:
            d_log_total = swap_time_and_heads(self.leaf.read.d_log_total(out, d_o))
            log_total = swap_time_and_heads(log_total[..., None])
            gradients["sink"] = sink_vjp(self.x["sink"], log_total, d_log_total)
        return gradients

    def _pulled_exponentials(self, v: Array, rows: ReadRows) -> Sums:
        """Gradient through the mean A e^{v − ν} = e^{o − ν}, whose own gradient is g."""
        shift = jnp.max(v, axis=2, keepdims=True)
        weights = jnp.exp(v - shift)
        # o − ν is between −R and 0, except in rows without weights.
        below = jnp.clip(rows.o - shift[None], -RANGE[dtype_name(v)], 0.0)
        g = rows.d_o * jnp.exp(-below)
        result = self._pulled(MeanRead(), weights, ReadRows(rows.log_total, jnp.exp(below), g))
        return result | {"v": weights * result["v"]}
