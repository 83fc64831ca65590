"""Reading a row block by mean:  o = Σ_j e^{S_ij − m_i} v_j / Σ_j e^{S_ij − m_i},  m_i = max_j S_ij.

A sink (`spec/sink.py`) is one more term e^{σ − m_i} of the denominator. Backward, with the residual
λ_i, m_i plus the logarithm of the denominator:

    A = e^{S − λ},    dv = Aᵀ do,    dS = A ∘ (do vᵀ − rowsum(do ∘ o)).

`MeanAndLogSumRead` writes λ to the last channel of the output, and adds its cotangent to dS / A.
"""

from __future__ import annotations

import math

from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import finite_or_zero, row_sum, transpose
from precondattn.spec.read import MEAN, MEAN_AND_LOG_SUM
from precondattn_portable.arithmetic import Arithmetic, Scratch
from precondattn_portable.layout import tokens_at


def exponentials(
    ops: Arithmetic, row_block: Array, sink: Array | None = None
) -> tuple[Array, Array, Array]:
    """e^{S − m}, its sum over each row (1 without visible keys), and λ (0 there).

    A sink (b, n, rows, 1) is in the sum. A row without visible keys then has λ = σ.
    """
    xp = namespace(row_block)
    largest = xp.max(row_block, axis=-1, keepdims=True)
    shift = finite_or_zero(largest if sink is None else xp.maximum(largest, sink))
    row_block = ops.exp(ops.add(row_block, -shift))
    total = row_sum(row_block)
    if sink is not None:
        total = total + xp.exp(sink - shift)
    total = xp.where(total > 0, total, 1.0)
    return row_block, total, shift + xp.log(total)


def sink_of_rows(sink: Array | None, rows: int) -> Array | None:
    """σ (b, n, r) beside a row block (b, n, rows, …), whose rows are r times its queries."""
    if sink is None:
        return None
    xp, (b, n, r) = namespace(sink), sink.shape
    each = xp.broadcast_to(sink[..., None], (b, n, r, rows // r))
    return xp.reshape(each, (b, n, rows, 1))


class MeanRead:
    """The read of a group of heads with values (b, n, s, e), and sinks (b, n, r)."""

    def __init__(
        self, ops: Arithmetic, v: Array, sink: Array | None = None, *, gradient: bool = False
    ) -> None:
        self.ops, self.v, self.sink = ops, v, sink
        if gradient:
            self.d_v = ops.zeros(v.shape, v)

    def forward(self, row_block: Array, low: int, high: int) -> tuple[Array, Array]:
        """Row block (b, n, rows, high − low) to outputs (b, n, rows, e) and λ (b, n, rows, 1)."""
        sink = sink_of_rows(self.sink, row_block.shape[2])
        row_block, total, log_total = exponentials(self.ops, row_block, sink)
        o = self.ops.product(row_block, self.v[:, :, low:high, :])
        return self.ops.multiply(o, 1.0 / total), log_total

    def backward(
        self,
        row_block: Array,
        log_total: Array,
        low: int,
        high: int,
        o: Array,
        d_o: Array,
        workspace: Scratch,
    ) -> Array:
        """dS of the row block; adds dv to `d_v`."""
        d_log_total = MEAN.d_log_total(o, d_o)
        return self._pulled(row_block, log_total, low, high, d_o, d_log_total, workspace)

    def _pulled(
        self,
        row_block: Array,
        log_total: Array,
        low: int,
        high: int,
        d_o: Array,
        d_log_total: Array,
        workspace: Scratch,
    ) -> Array:
        weights = self.ops.exp(self.ops.add(row_block, -log_total))
        self.ops.add_product_at(self.d_v, tokens_at(low, high), transpose(weights), d_o)
        d_weights = self.ops.product(
            d_o, transpose(self.v[:, :, low:high, :]), workspace.shaped(row_block.shape)
        )
        d_weights = self.ops.add(d_weights, d_log_total)
        return self.ops.multiply(d_weights, weights)

    def finish(self) -> Array:
        return self.d_v


class MeanAndLogSumRead(MeanRead):
    """The same, with λ in the last channel of the output. That of the values is not read."""

    def __init__(
        self, ops: Arithmetic, v: Array, sink: Array | None = None, *, gradient: bool = False
    ) -> None:
        super().__init__(ops, v[..., :-1], sink, gradient=gradient)

    def forward(self, row_block: Array, low: int, high: int) -> tuple[Array, Array]:
        xp = namespace(row_block)
        some = xp.max(row_block, axis=-1, keepdims=True) > -math.inf
        o, log_total = super().forward(row_block, low, high)
        last = log_total if self.sink is not None else xp.where(some, log_total, -math.inf)
        return xp.concat([o, last], axis=-1), log_total

    def backward(
        self,
        row_block: Array,
        log_total: Array,
        low: int,
        high: int,
        o: Array,
        d_o: Array,
        workspace: Scratch,
    ) -> Array:
        d_log_total = MEAN_AND_LOG_SUM.d_log_total(o, d_o)
        d_mean = d_o[..., :-1] + 0  # In one piece.
        return self._pulled(row_block, log_total, low, high, d_mean, d_log_total, workspace)

    def finish(self) -> Array:
        xp = namespace(self.d_v)
        return xp.concat([self.d_v, xp.zeros_like(self.v[..., :1])], axis=-1)
