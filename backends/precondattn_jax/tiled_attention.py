"""Softmax attention, one tile of scores at a time, for every metric and read.

    forward:   S = s ⟨q, k⟩ (capped) + decay + bias, −∞ at masked pairs;  read S (`read_mean.py`, …)
    backward:  recompute S from q and k;  dS from the read;  then through bias, decay and scores.

Residuals: λ, the logarithm of each row's sum of weights, a sink's included. The outer loop iterates
over blocks of queries, the inner loop over the tiles they attend to: forward from the nearest to
the first, backward from the first to the nearest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax import Array, lax

from precondattn.arrays import Tree, dtype_name
from precondattn.frame import Frame
from precondattn.spec.array_functions import sum_to, swap_time_and_heads
from precondattn.spec.laser import LOG_MEAN_EXP, RANGE
from precondattn.spec.metric import DOT
from precondattn.spec.read import MEAN_AND_LOG_SUM
from precondattn.spec.sink import sink_vjp
from precondattn.spec.softmax import SoftmaxAttention
from precondattn_jax.arithmetic import zeros
from precondattn_jax.capped_scores import CappedScores
from precondattn_jax.dot_scores import DotScores, Sums
from precondattn_jax.forget_gate import ForgetGate
from precondattn_jax.layout import (
    REFLECTIONS,
    QueryBlocks,
    block_size,
    grouped,
    heads_first,
)
from precondattn_jax.loops import PLAIN, Loops
from precondattn_jax.masks import Mask
from precondattn_jax.read_log_mean_exp import LogMeanExpRead, is_narrow
from precondattn_jax.read_mean import MeanAndLogSumRead, MeanRead, ReadRows
from precondattn_jax.transported_scores import TransportedScores
from precondattn_portable.layout import grouped_bias, zero_padding

Reads = MeanRead | LogMeanExpRead


def read_of(leaf: SoftmaxAttention, x: Mapping[str, Array]) -> Reads:
    """The read of a leaf, with its sinks."""
    if leaf.read == LOG_MEAN_EXP:
        return LogMeanExpRead()
    read = MeanAndLogSumRead if leaf.read == MEAN_AND_LOG_SUM else MeanRead
    return read(x["sink"] if leaf.sink else None)


class TiledAttention:
    """A full call of `Softmax` or `Path`, split into blocks."""

    loops: Loops = PLAIN

    def __init__(self, leaf: SoftmaxAttention, x: Mapping[str, Array], frame: Frame) -> None:
        self.leaf, self.x, self.frame = leaf, x, frame
        (self.b, t, h, d), (_, s, self.n, _) = x["q"].shape, x["k"].shape
        self.r = h // self.n
        most = None if leaf.metric == DOT else REFLECTIONS
        size = block_size(s, self.b * h, most, packed=frame.k_segment is not None)
        self.blocks = blocks = QueryBlocks(t, s, size)
        self.mask = Mask(
            frame, blocks, causal=leaf.causal, window=leaf.window, of_queries=leaf.bias
        )
        q = blocks.stacked(grouped(x["q"], self.n) * leaf.scale_for(d))
        k = self._of_keys("k")
        self.scores: DotScores
        if leaf.metric == DOT:
            self.scores = DotScores(blocks, q, k)
            if leaf.softcap is not None:
                self.scores = CappedScores(self.scores, leaf.softcap)
        else:
            self.scores = TransportedScores(blocks, q, k, self._of_keys("w"), self._of_keys("beta"))
        v = heads_first(x["v"])
        # Padding repeats the last value, so that it does not widen the range of values.
        self.v = jnp.pad(v, ((0, 0), (0, 0), (0, blocks.after), (0, 0)), mode="edge")
        self.gate: ForgetGate | None = None
        if leaf.forget != "none":
            g = self._of_keys("g")
            g = jnp.reshape(g, (self.b, self.n, self.r, g.shape[-1]))
            self.gate = ForgetGate(blocks, g, leaf._gate_scale(d))
        self.bias: Array | None = None
        if leaf.bias:
            self.bias = blocks.of_keys(blocks.of_queries(grouped_bias(x["bias"], self.n)), 4)

    def _of_keys(self, name: str) -> Array:
        return self.blocks.of_keys(heads_first(self.x[name]))

    def _masked(self, tile: Array, a: Array, j: Array, *, diagonal: bool = False) -> Array:
        """Scores of a tile plus decay and bias, −∞ at masked pairs."""
        if self.gate is not None or self.bias is not None:
            pairs = self._pairs(tile)
            if self.gate is not None:
                pairs = self.gate.add_to(pairs, a, j, diagonal=diagonal)
            if self.bias is not None:
                pairs = pairs + self._bias_at(self.bias, a, j)
            tile = jnp.reshape(pairs, tile.shape)
        return self.mask.apply(tile, a, j, diagonal=diagonal)

    def _pairs(self, tile: Array) -> Array:
        """(b, n, r C, C) as (b, n, r, C, C)."""
        return jnp.reshape(tile, (self.b, self.n, self.r, self.blocks.size, self.blocks.size))

    def _bias_at(self, bias: Array, a: Array, j: Array) -> Array:
        return self.blocks.take(self.blocks.take(bias, a - self.blocks.first, 3), j, 4)

    # ------------------------------------------------------------------------------ forward

    def outputs(
        self, read: Reads, v: Array, before: Callable[..., Tree] | None = None
    ) -> tuple[Array, Array]:
        """Outputs (blocks, b, n, r C, e) and λ (blocks, b, n, r C, 1).

        `before(a, rows, state)` reads, for block a, keys outside the call.
        """
        scores, mask, blocks = self.scores, self.mask, self.blocks

        def add(carry: tuple[Tree, Array], a: Array, j: Array) -> tuple[Tree, Array]:
            state, x = carry
            tile = self._masked(scores.tile(x, j), a, j)
            return read.add(state, tile, blocks.take(v, j)), scores.carried(x, j)

        def of_block(a: Array) -> tuple[Array, Array]:
            x = scores.start(a)
            state: Tree = read.start((*x.shape[:3], v.shape[3]), v)
            if before is not None:
                state = before(a, x, state)
            first = mask.first(a)
            if mask.causal:
                diagonal = self._masked(scores.diagonal(a), a, a, diagonal=True)
                state = read.add(state, diagonal, blocks.take(v, a))
                stop = a
            else:
                stop = mask.stop(a)
            state, _ = self.loops.counted(
                blocks.keys, stop - first, lambda i, carry: add(carry, a, stop - 1 - i), (state, x)
            )
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
        some = mean != 0
        return jnp.where(some, shift + jnp.log(jnp.where(some, mean, 1.0)), 0.0), log_total

    # ----------------------------------------------------------------------------- backward

    def _pulled(self, read: Reads, v: Array, rows: ReadRows) -> Sums:
        """The gradients of stacked queries, keys, values, and the other inputs."""
        scores, mask, blocks = self.scores, self.mask, self.blocks

        def sums() -> Sums:
            totals: Sums = {"scores": scores.sums(), "v": zeros(v.shape, v)}
            if self.gate is not None:
                totals["gate"] = self.gate.sums()
            if self.bias is not None:
                totals["bias"] = zeros(self.bias.shape, self.bias)
            return totals

        def of_tile(
            totals: Sums,
            tile: Array,
            block_rows: ReadRows,
            a: Array,
            j: Array,
            diagonal: bool,
        ) -> tuple[Sums, Array]:
            """The sums plus a tile's part for all but the scores, and the tile's gradient."""
            d_tile, d_v = read.pull(tile, blocks.take(v, j), block_rows)
            totals = totals | {"v": blocks.add(totals["v"], j, d_v)}
            if self.gate is not None or self.bias is not None:
                pairs = self._pairs(d_tile)
                if self.gate is not None:
                    totals["gate"] = self.gate.pulled(
                        totals["gate"], a, j, pairs, diagonal=diagonal
                    )
                if self.bias is not None:
                    totals["bias"] = self._with_bias(totals["bias"], a, j, pairs)
            return totals, d_tile

        def of_block(totals: Sums, a: Array) -> tuple[Sums, Array]:
            first = mask.first(a)
            stop = a if mask.causal else mask.stop(a)
            trail = scores.trail(a, first)
            block_rows = ReadRows(*(blocks.row(stack, a) for stack in rows))

            def pull(i: Array, carry: tuple[Sums, Array]) -> Tree:
                totals, y = carry
                j = first + i
                tile = self._masked(scores.tile(scores.on_trail(trail, j), j), a, j)
                totals, d_tile = of_tile(totals, tile, block_rows, a, j, False)
                of_scores, y = scores.pulled(totals["scores"], trail, y, j, d_tile)
                return totals | {"scores": of_scores}, y

            y = zeros(scores.q.shape[1:], scores.q)
            totals, y = lax.fori_loop(0, stop - first, pull, (totals, y))
            if mask.causal:
                tile = self._masked(scores.diagonal(a), a, a, diagonal=True)
                totals, d_diagonal = of_tile(totals, tile, block_rows, a, a, True)
                of_scores, y = scores.pulled_diagonal(totals["scores"], a, y, d_diagonal)
                totals = totals | {"scores": of_scores}
            return totals, y

        totals, d_q = lax.scan(of_block, sums(), blocks.rows)
        result = {"q": d_q, "v": totals["v"]} | scores.gradients(totals["scores"])
        if self.gate is not None:
            result["g"] = self.gate.gradient(totals["gate"])
        if self.bias is not None:
            result["bias"] = totals["bias"]
        return result

    def _with_bias(self, d_bias: Array, a: Array, j: Array, pairs: Array) -> Array:
        here = self._bias_at(d_bias, a, j)
        result = here + sum_to(pairs, here.shape)
        a = a - self.blocks.first
        rows = self.blocks.put(self.blocks.take(d_bias, a, 3), j, result, 4)
        return self.blocks.put(d_bias, a, rows, 3)

    def backward(self, out: Array, log_total: Array, cotangent: Array) -> dict[str, Array]:
        """The gradient of every input."""
        d_o = zero_padding(cotangent, self.frame)
        of_nothing = self.x["sink"] if self.leaf.sink else 0
        is_empty = (log_total == of_nothing)[..., None] & jnp.all(out == 0, axis=-1, keepdims=True)
        # A norm applied to a row without visible keys divides by almost 0.
        d_o = jnp.where(is_empty & ~jnp.isfinite(d_o), 0.0, d_o)
        if self.frame.q_valid is not None:
            # The output of a padded query is 0, not that of its scores. It has no weights.
            log_total = jnp.where(self.frame.q_valid[:, :, None], log_total, math.inf)
        rows = ReadRows(
            # Rows before the first query have no weights.
            self.blocks.stacked(grouped(log_total[..., None], self.n), math.inf),
            self.blocks.stacked(grouped(out, self.n)),
            self.blocks.stacked(grouped(d_o, self.n)),
        )
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
        gradients = self._gradients(result)
        if self.leaf.sink:
            d_log_total = swap_time_and_heads(self.leaf.read.d_log_total(out, d_o))
            log_total = swap_time_and_heads(log_total[..., None])
            gradients["sink"] = sink_vjp(self.x["sink"], log_total, d_log_total)
        return gradients

    def _pulled_exponentials(self, v: Array, rows: ReadRows) -> Sums:
        """Gradient through the mean A e^{v − ν} = e^{o − ν}, whose own gradient is g."""
        shift = jnp.max(v, axis=2, keepdims=True)
        weights = jnp.exp(v - shift)
        # Only in rows without weights is o − ν not between −R and 0.
        below = jnp.clip(rows.o - shift, -RANGE[dtype_name(v)], 0.0)
        g = rows.d_o * jnp.exp(-below)
        result = self._pulled(MeanRead(), weights, ReadRows(rows.log_total, jnp.exp(below), g))
        return result | {"v": weights * result["v"]}

    def _gradients(self, result: Sums) -> dict[str, Array]:
        """Gradients by input, from those of the blocks."""
        x, blocks = self.x, self.blocks
        d_q = blocks.unstacked(result["q"], self.r) * self.leaf.scale_for(x["k"].shape[3])
        gradients = {"q": d_q}
        for name in ("k", "v", "w", "beta"):
            if name in result:
                gradients[name] = heads_first(result[name][:, :, : blocks.s])
        if "g" in result:
            d_g = jnp.reshape(result["g"], (self.b, -1, result["g"].shape[3]))
            gradients["g"] = heads_first(d_g[:, :, : blocks.s])
        if "bias" in result:
            rows = slice(blocks.before, blocks.before + blocks.t)
            d_bias = result["bias"][:, :, :, rows, : blocks.s]
            gradients["bias"] = jnp.reshape(d_bias, x["bias"].shape)
        return gradients
