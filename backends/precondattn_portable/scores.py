"""Row blocks of dot products, and their gradient.

    S = q kᵀ,    dq = dS k,    dk = dSᵀ q

for a block of query rows and a range of keys.
"""

from __future__ import annotations

from typing import Protocol

from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import transpose
from precondattn_portable.arithmetic import Arithmetic, Scratch
from precondattn_portable.layout import tokens_at


class Scores(Protocol):
    """The scores of queries (b, n, r, t, d) and keys (b, n, s, d), one row block at a time.

    Row blocks have shape (b, n, r (i1 − i0), high − low).
    """

    @property
    def d_q(self) -> Array: ...

    @property
    def d_k(self) -> Array: ...

    def row_block(self, i0: int, i1: int, low: int, high: int, workspace: Scratch) -> Array:
        """Scores of queries i0 … i1 − 1 with keys low … high − 1."""
        ...

    def pull(self, i0: int, i1: int, low: int, high: int, d_row_block: Array) -> None:
        """Add the gradients of queries and keys, from that of the last row block."""
        ...


def block_of_rows(q: Array, i0: int, i1: int) -> Array:
    """Rows i0 … i1 − 1 of all query heads of a key head, as (b, n, r (i1 − i0), d)."""
    b, n, r, _, d = q.shape
    return namespace(q).reshape(q[:, :, :, i0:i1, :], (b, n, r * (i1 - i0), d))


class DotScores:
    """Scores by the dot product."""

    def __init__(self, ops: Arithmetic, q: Array, k: Array, *, gradient: bool = False) -> None:
        self.ops, self.q, self.k = ops, q, k
        if gradient:
            self.d_q, self.d_k = ops.zeros(q.shape, q), ops.zeros(k.shape, k)

    def row_block(self, i0: int, i1: int, low: int, high: int, workspace: Scratch) -> Array:
        rows = block_of_rows(self.q, i0, i1)
        shape = (*rows.shape[:3], high - low)
        keys = transpose(self.k[:, :, low:high, :])
        return self.ops.product(rows, keys, workspace.shaped(shape))

    def pull(self, i0: int, i1: int, low: int, high: int, d_row_block: Array) -> None:
        rows = block_of_rows(self.q, i0, i1)
        d_rows = self.ops.product(d_row_block, self.k[:, :, low:high, :])
        xp = namespace(d_rows)
        self.d_q[:, :, :, i0:i1, :] = xp.reshape(d_rows, self.q[:, :, :, i0:i1, :].shape)
        self.ops.add_product_at(self.d_k, tokens_at(low, high), transpose(d_row_block), rows)
