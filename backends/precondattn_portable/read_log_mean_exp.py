"""LASER's read, a log-mean-exp of the values:  o_ic = log Σ_j e^{S_ij + v_jc} − log Σ_j e^{S_ij}.

As a product of matrices, with a shift ν_c for each channel:

    o = ν + log(A e^{v − ν}),    A = softmax(S),
    dv = e^{v − ν} ∘ (Aᵀ g),    dS = A ∘ (g (e^{v − ν})ᵀ − rowsum(do)),    g = do ∘ e^{ν − o}.

This is accurate as long as no relevant e^{v − ν} underflows: if all values of a channel are within
R(dtype) of each other, every factor is at least e^{−R}, and so is every sum. Where the values of a
channel are further apart, keys are processed in blocks, each with its own shift μ_iJ + ν_Jc, where
μ_iJ is the block's largest score. A block whose own values are too far apart is computed element by
element, with the largest S_ij + v_jc as the shift. Blocks are merged as

    M' = max(M, M_J),    a ← a e^{M − M'} + a_J e^{M_J − M'},    o = M + log a − λ.

A masked key may affect a shift, but does no harm: only shifts of close values include masked keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from precondattn.arrays import Array, dtype_name, has_only_a_shape, namespace
from precondattn.spec.array_functions import finite_or_zero, row_sum, transpose
from precondattn.spec.laser import RANGE
from precondattn_portable.arithmetic import Arithmetic, Scratch
from precondattn_portable.layout import Tile, blocks
from precondattn_portable.read_mean import ReadRows, exponentials, log_weights

BLOCK = 128
"""Keys that share a shift if not all keys do."""

ELEMENTS = 16
"""Keys that are processed element by element at once."""


class LogMeanExpRead:
    """The read of a group of heads with values (b, n, s, e)."""

    again = False
    """As in `MeanRead`"""

    def __init__(
        self, ops: Arithmetic, v: Array, sink: None = None, *, gradient: bool = False
    ) -> None:
        self.ops, self.v = ops, v
        xp = namespace(v)
        self.range = RANGE[dtype_name(v)]
        self.shift = xp.max(v, axis=2, keepdims=True)
        """ν (b, n, 1, e)"""
        self.is_narrow = has_only_a_shape(v) or bool(
            xp.all(self.shift - xp.min(v, axis=2, keepdims=True) <= self.range)
        )
        if self.is_narrow:
            self.weights = ops.exp(v - self.shift)
            """e^{v − ν}"""
        if gradient:
            self.d_v = ops.zeros(v.shape, v)

    def forward(self, row_block: Array, tile: Tile) -> tuple[Array, Array]:
        """Masked scores (b, n, rows, keys) to outputs (b, n, rows, e) and λ (b, n, rows, 1)."""
        xp = namespace(row_block)
        if not self.is_narrow:
            return self._merged(row_block, tile.low, tile.high)
        some = xp.max(row_block, axis=-1, keepdims=True) != -xp.inf
        row_block, total, log_total = exponentials(self.ops, row_block)
        mean = self.ops.product(row_block, self.weights[tile.keys]) / total
        o = self.shift + xp.log(xp.where(some, mean, 1.0))
        return xp.where(some, o, 0.0), log_total

    def _merged(self, row_block: Array, low: int, high: int) -> tuple[Array, Array]:
        xp, largest, total = namespace(row_block), None, None
        for start, stop, is_narrow in self._blocks(low, high):
            scores, v = row_block[..., start - low : stop - low], self.v[:, :, start:stop, :]
            if is_narrow:
                mu, nu = _largest(scores, -1), _largest(v, 2)
                part = xp.exp(scores - finite_or_zero(mu)) @ xp.exp(v - nu)
                shift = mu + nu
            else:
                sums = scores[..., None] + v[:, :, None, :, :]
                shift = xp.max(sums, axis=3)
                part = xp.sum(xp.exp(sums - finite_or_zero(shift)[:, :, :, None, :]), axis=3)
            if largest is None:
                largest, total = shift, part
                continue
            merged = xp.maximum(largest, shift)
            base = finite_or_zero(merged)
            total = total * xp.exp(largest - base) + part * xp.exp(shift - base)
            largest = merged
        some = largest != -xp.inf
        log_sum = finite_or_zero(largest) + xp.log(xp.where(some, total, 1.0))
        _, _, log_total = exponentials(self.ops, row_block)
        return xp.where(some, log_sum - log_total, 0.0), log_total

    def _blocks(self, low: int, high: int) -> Iterator[tuple[int, int, bool]]:
        """(start, stop, whether the values are close together) of blocks of keys."""
        xp = namespace(self.v)
        for start, stop in blocks(high - low, BLOCK):
            v = self.v[:, :, low + start : low + stop, :]
            if bool(xp.all(_largest(v, 2) + _largest(-v, 2) <= self.range)):
                yield low + start, low + stop, True
                continue
            for first, last in blocks(stop - start, ELEMENTS):
                yield low + start + first, low + start + last, False

    def backward(self, row_block: Array, tile: Tile, rows: ReadRows, workspace: Scratch) -> Array:
        """dS of the row block; adds dv to `d_v`."""
        ops, (log_total, o, d_o) = self.ops, rows
        again = self.again
        logs = log_weights(row_block, log_total) if again else ops.add(row_block, -log_total)
        if not self.is_narrow:
            return self._merged_backward(logs, tile, o, d_o)
        weights = ops.exp(logs)
        # ν − o exceeds R only in rows without weights.
        g = d_o * namespace(o).exp(_at_most(self.shift - o, self.range))
        ops.add_product_at(self.d_v, tile.keys, transpose(weights), g)
        values = transpose(self.weights[tile.keys])
        d_weights = ops.product(g, values, workspace.shaped(row_block.shape))
        return ops.multiply(ops.add(d_weights, -row_sum(d_o)), weights)

    def _merged_backward(self, log_weights: Array, tile: Tile, o: Array, d_o: Array) -> Array:
        """dS of the row block by blocks of keys; adds dv to `d_v`. With w = e^{S − λ + v − o}:

                dv_jc = Σ_i do_ic w_ijc,    dS_ij = Σ_c do_ic (w_ijc − A_ij).

        A block of close values is computed as products of matrices, p gᵀ and so on, with

            p = e^{S − λ + α},    g = do ∘ e^{ν − o − α},    α = max_c(ν_c − o_c) ≥ 0,

        and α limited such that p ≤ e^R. Then ν − o − α ≤ 0, since o ≥ max_j(S − λ) + ν − R over the
        block. Rows with no weight in the block have p = 0, and there the exponent is set to 0.
        """
        xp = namespace(o)
        d_row_block = -row_sum(d_o) * xp.exp(log_weights)
        for start, stop, is_narrow in self._blocks(tile.low, tile.high):
            here = slice(start - tile.low, stop - tile.low)
            logs, v = log_weights[..., here], self.v[:, :, start:stop, :]
            if is_narrow:
                nu = _largest(v, 2)
                most = xp.max(nu - o, axis=-1, keepdims=True)
                limit = self.range - finite_or_zero(_largest(logs, -1))
                alpha = xp.minimum(xp.clip(most, min=0.0), limit)
                p, g = xp.exp(logs + alpha), d_o * xp.exp(_at_most(nu - o - alpha, 0.0))
                w = xp.exp(v - nu)
                d_v, d_scores = w * (transpose(p) @ g), p * (g @ transpose(w))
            else:
                posterior = xp.exp(logs[..., None] + v[:, :, None, :, :] - o[:, :, :, None, :])
                weighted = d_o[:, :, :, None, :] * posterior
                d_v, d_scores = xp.sum(weighted, axis=2), xp.sum(weighted, axis=-1)
            self.d_v[:, :, start:stop, :] = self.d_v[:, :, start:stop, :] + d_v
            d_row_block[..., here] = d_row_block[..., here] + d_scores
        return d_row_block

    def finish(self) -> Array:
        """dv"""
        return self.d_v * self.weights if self.is_narrow else self.d_v


def _at_most(x: Array, limit: float) -> Array:
    return namespace(x).clip(x, max=limit)


def _largest(x: Array, axis: int) -> Array:
    return namespace(x).max(x, axis=axis, keepdims=True)
