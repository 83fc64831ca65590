"""Reading a row block by mean:  o = Σ_j e^{S_ij − m_i} v_j / Σ_j e^{S_ij − m_i},  m_i = max_j S_ij.

Backward, with the residual λ_i = m_i + log Σ_j e^{S_ij − m_i}:

    A = e^{S − λ},    dv = Aᵀ do,    dS = A ∘ (do vᵀ − rowsum(do ∘ o)).
"""

from __future__ import annotations

from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import finite_or_zero, row_sum, transpose
from precondattn_portable.arithmetic import Arithmetic, Scratch
from precondattn_portable.layout import at


def exponentials(ops: Arithmetic, row_block: Array) -> tuple[Array, Array, Array]:
    """e^{S − m}, its sum over each row (1 without visible keys), and λ (0 there)."""
    xp = namespace(row_block)
    shift = finite_or_zero(xp.max(row_block, axis=-1, keepdims=True))
    row_block = ops.exp(ops.add(row_block, -shift))
    total = row_sum(row_block)
    total = xp.where(total > 0, total, 1.0)
    return row_block, total, shift + xp.log(total)


class MeanRead:
    """The read of a group of heads with values (b, n, s, e)."""

    def __init__(self, ops: Arithmetic, v: Array, *, gradient: bool = False) -> None:
        self.ops, self.v = ops, v
        if gradient:
            self.d_v = ops.zeros(v.shape, v)

    def forward(self, row_block: Array, low: int, high: int) -> tuple[Array, Array]:
        """Row block (b, n, rows, high − low) to outputs (b, n, rows, e) and λ (b, n, rows, 1)."""
        row_block, total, log_total = exponentials(self.ops, row_block)
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
        weights = self.ops.exp(self.ops.add(row_block, -log_total))
        self.ops.add_product_at(self.d_v, at(low, high), transpose(weights), d_o)
        d_weights = self.ops.product(
            d_o, transpose(self.v[:, :, low:high, :]), workspace.shaped(row_block.shape)
        )
        d_weights = self.ops.add(d_weights, -row_sum(d_o * o))
        return self.ops.multiply(d_weights, weights)

    def finish(self) -> Array:
        return self.d_v
