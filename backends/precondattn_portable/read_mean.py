"""The read of softmax, a mean:  o = Σ_j e^{S_ij − m_i} v_j / Σ_j e^{S_ij − m_i},  m_i = max_j S_ij.

A sink (`softmax.py`) is one more term e^{σ − m_i} of the denominator. Backward, with the residual
λ_i, m_i plus the logarithm of the denominator:

    A = e^{S − λ},    dv = Aᵀ do,    dS = A ∘ (do vᵀ − rowsum(do ∘ o)).

`MeanAndLogSumRead` writes λ to the last channel of the output, and adds its cotangent to dS / A.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from precondattn.arrays import Array, device_of, has_only_a_shape, namespace
from precondattn.spec.array_functions import log_softmax, transpose
from precondattn.spec.read import MEAN, MEAN_AND_LOG_SUM, Read
from precondattn_portable.arithmetic import Arithmetic, Scratch
from precondattn_portable.layout import Tile, padded


def exponentials(
    ops: Arithmetic, row_block: Array, sink: Array | None = None
) -> tuple[Array, Array, Array]:
    """e^{S − m}, its sum over each row (1 without visible keys), and λ (0 there).

    A sink (b, n, rows, 1) is in the sum. A row without visible keys then has λ = σ.
    """
    xp = ops.namespace(row_block)
    largest = xp.max(row_block, axis=-1, keepdims=True)
    shift = largest if sink is None else xp.maximum(largest, sink)
    shift = ops.replaced(shift, -math.inf, 0.0)  # A row may have no visible key.
    row_block = ops.exp(ops.subtract(row_block, shift))
    total = xp.sum(row_block, axis=-1, keepdims=True)
    if sink is not None:
        total = total + xp.exp(sink - shift)
    total = ops.replaced(total, 0.0, 1.0)
    return row_block, total, shift + xp.log(total)


def sink_of_rows(sink: Array | None, rows: int) -> Array | None:
    """σ (b, n, r) beside a row block (b, n, rows, …), whose rows are r times its queries."""
    if sink is None:
        return None
    xp, (b, n, r) = namespace(sink), sink.shape
    each = xp.broadcast_to(sink[..., None], (b, n, r, rows // r))
    return xp.reshape(each, (b, n, rows, 1))


def are_far(log_total: Array) -> bool:
    """Whether some λ, and scores that are computed twice, are rounded by more than 2⁻¹⁴.

    Then weights e^{S − λ} would not sum to 1, or overflow, and the gradient computes λ `again`.
    Where reading an entry waits for a device, it is not asked.
    """
    if device_of(log_total) != "cpu" or has_only_a_shape(log_total):
        return False
    xp, size = namespace(log_total), abs(log_total)
    most = 2.0**-13 / xp.finfo(size.dtype).eps
    if 0 in size.shape or float(xp.max(size)) <= most:
        return False
    return bool(xp.any((size > most) & (size < math.inf)))


def log_weights(row_block: Array, log_total: Array, sink: Array | None = None) -> Array:
    """S − λ where λ is rounded; −∞ where λ is ∞.

    It is S − λ' with the λ' of these rows, which has their rounding. If λ is of more keys than
    these, the two differ by more than their rounding, and λ' − λ is added.
    """
    logs, of_rows = log_softmax(row_block, sink)
    xp = namespace(logs)
    difference = of_rows - log_total
    rounding = 8 * xp.finfo(logs.dtype).eps * xp.abs(log_total)
    is_partial = (xp.abs(difference) > rounding) & (xp.abs(difference) < math.inf)
    logs = logs + xp.where(is_partial, difference, 0.0)
    return xp.where(log_total < math.inf, logs, -math.inf)


class ReadRows(NamedTuple):
    """The rows of a tile (b, n, rows, …) that its gradient reads: o, λ and do."""

    log_total: Array
    """λ"""
    o: Array
    d_o: Array


class MeanRead:
    """The read of a group of heads with values (b, n, s, e), and sinks (b, n, r)."""

    kind: Read = MEAN
    again = False
    """Whether the gradient computes λ again (`are_far`)"""

    def __init__(
        self, ops: Arithmetic, v: Array, sink: Array | None = None, *, gradient: bool = False
    ) -> None:
        self.ops, self.v, self.sink = ops, v, sink
        if gradient:
            self.d_v = ops.zeros(v.shape, v)

    def forward(self, row_block: Array, tile: Tile) -> tuple[Array, Array]:
        """Masked scores (b, n, rows, keys) to outputs (b, n, rows, e) and λ (b, n, rows, 1)."""
        sink = self.sink
        if sink is not None:
            sink = sink_of_rows(sink, row_block.shape[2])
        row_block, total, log_total = exponentials(self.ops, row_block, sink)
        o = self.ops.product(row_block, self.v[tile.keys])
        return self.ops.multiply(o, self.ops.reciprocal(total)), log_total

    def backward(self, row_block: Array, tile: Tile, rows: ReadRows, workspace: Scratch) -> Array:
        """dS of the row block; adds dv to `d_v`."""
        ops, d_mean = self.ops, self.of_mean(rows.d_o)
        if self.again:
            sink = sink_of_rows(self.sink, row_block.shape[2])
            weights = ops.exp(log_weights(row_block, rows.log_total, sink))
        else:
            weights = ops.exp(ops.subtract(row_block, rows.log_total))
        ops.add_product_at(self.d_v, tile.keys, transpose(weights), d_mean)
        values = transpose(self.v[tile.keys])
        d_weights = ops.product(d_mean, values, workspace.shaped(row_block.shape))
        d_weights = ops.add(d_weights, self.kind.d_log_total(rows.o, rows.d_o))
        return ops.multiply(d_weights, weights)

    def of_mean(self, d_o: Array) -> Array:
        """The cotangent of the mean."""
        return d_o

    def finish(self) -> Array:
        """dv"""
        return self.d_v


class MeanAndLogSumRead(MeanRead):
    """The mean, and λ in the last channel of the output; the last channel of v is not read."""

    kind = MEAN_AND_LOG_SUM

    def __init__(
        self, ops: Arithmetic, v: Array, sink: Array | None = None, *, gradient: bool = False
    ) -> None:
        super().__init__(ops, v[..., :-1], sink, gradient=gradient)

    def forward(self, row_block: Array, tile: Tile) -> tuple[Array, Array]:
        xp = namespace(row_block)
        some = xp.max(row_block, axis=-1, keepdims=True) > -math.inf
        o, log_total = super().forward(row_block, tile)
        last = log_total if self.sink is not None else xp.where(some, log_total, -math.inf)
        return xp.concat([o, last], axis=-1), log_total

    def of_mean(self, d_o: Array) -> Array:
        return d_o[..., :-1] + 0  # A contiguous copy.

    def finish(self) -> Array:
        return padded(self.d_v, 0, 1, axis=3)
