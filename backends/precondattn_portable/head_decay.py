"""The decay of a chunk, and between its tokens, with one decay for the whole state.

    D_ij = e^{g_{j+1} + … + g_i}  (j ≤ i),    reading_i = e^{g_1 + … + g_i},
    writing_j = e^{g_{j+1} + … + g_C},        total = e^{g_1 + … + g_C}.

Every exponent is a sum of gates, never a difference of sums. So the weak gates after a strong one
lose no digits, and a gate of −∞, which forgets everything, is no special case. The gradient of a
gate is such a sum too, over the pairs of tokens that it separates.

Arrays are in chunks, (c, n, C, …): the chunks first, then the heads of all sequences.
"""

from __future__ import annotations

from functools import cached_property

from precondattn.arrays import Array, arange_like, cast, namespace
from precondattn.spec.array_functions import row_sum, transpose
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.layout import padded

FORGOTTEN = -1e4
"""The value of lower gates, such as −∞: e^g is 0 in every precision, and 0 g is not NaN."""


def sums_before(x: Array) -> Array:
    """Σ_{j<i} x_j over tokens (…, C, w)."""
    return namespace(x).cumulative_sum(x, axis=-2, include_initial=True)[..., :-1, :]


def sums_from(x: Array, axis: int = -2) -> Array:
    """Σ_{j≥i} x_j over tokens (…, C, w)."""
    xp = namespace(x)
    return xp.flip(xp.cumulative_sum(xp.flip(x, axis=axis), axis=axis), axis=axis)


def decayed(x: Array, factor: Array | None) -> Array:
    """x (c, n, C, w), or with r rows per token (c, n, C, r, w), times the factor of each token."""
    if factor is None:
        return x
    return x * (factor if x.ndim == factor.ndim else factor[..., None, :])


def flat(rows: Array) -> Array:
    """r rows a token (c, n, C, r, w) as (c, n, C r, w)."""
    c, n, size, r, width = rows.shape
    return namespace(rows).reshape(rows, (c, n, size * r, width))


def summed_rows(rows: Array) -> Array:
    """The sum over the r rows of a token, (c, n, C, r, w) to (c, n, C, w)."""
    return rows[:, :, :, 0, :] if rows.shape[3] == 1 else namespace(rows).sum(rows, axis=3)


class ChunkDecay:
    """The decay of chunks, by gates (c, n, C, w) or by none."""

    reading: Array = None
    """The factor (c, n, C, w), None for 1; likewise `writing`, and `total` (c, n, 1, w)"""
    writing: Array = None
    total: Array = None

    def __init__(self, ops: Arithmetic, g: Array) -> None:
        self.ops, self.g = ops, g
        if g is not None:
            xp = namespace(g)
            self.reading = xp.exp(xp.cumulative_sum(g, axis=-2))
            following = xp.concat([g[..., 1:, :], xp.zeros_like(g[..., :1, :])], axis=-2)
            self.writing = xp.exp(sums_from(following))
            self.total = self.reading[:, :, -1:, :]

    @cached_property
    def among_states(self) -> Array:
        """The decay from each state between chunks to those after it (n w, c + 1, c + 1)."""
        xp = namespace(self.g)
        sums = xp.permute_dims(xp.sum(self.g, axis=-2), (1, 2, 0))
        sums = xp.reshape(sums, (1, -1, sums.shape[2], 1))
        sums = padded(sums, 1, 0)  # The first state has no chunk before it.
        return HeadDecay(self.ops, sums, sums).pairs[0, ...]

    def by_gate(self, x: Array) -> Array:
        """The sum over the channels that share a gate (c, n, C, w)."""
        return x

    def times_reading(self, rows: Array, states: Array) -> Array:
        """reading ∘ (rows S), for r rows a token (c, n, C, r, …)."""
        result = self.ops.product(flat(rows), states)
        result = namespace(result).reshape(result, (*rows.shape[:-1], result.shape[-1]))
        if self.reading is None:
            return result
        return self.ops.multiply(result, self.reading[..., None, :])

    def times_writing(self, rows: Array, states: Array) -> Array:
        """writing ∘ (rows S), for rows (c, n, C, …)."""
        result = self.ops.product(rows, states)
        return result if self.writing is None else self.ops.multiply(result, self.writing)

    def of_states(self, q: Array, states: Array) -> Array:
        """The outputs of queries (c, n, C, r, d) from the states before their chunks."""
        return self.times_reading(q, states)

    def d_g(self, within: Array, read: Array, written: Array, kept: Array) -> Array:
        """The gradient of the gates (c, n, C, w), from Σ dx ∘ x of everything they multiply.

        `within` is what `pull` returns. `read` and `written` are those sums for reads of the state
        before the chunk and writes to the state after it, `kept` (c, n, 1, w) for the decayed one.
        """
        d_g = self.ops.add(within, sums_from(read))
        d_g = self.ops.add(d_g, sums_before(written))
        return self.ops.add(d_g, kept)


class HeadDecay(ChunkDecay):
    """Decays of gates (c, n, C, 1), or of none."""

    def __init__(self, ops: Arithmetic, g: Array | None, like: Array) -> None:
        super().__init__(ops, g)
        token = arange_like(like.shape[2], like)[None, None, :]
        self.until = cast(token[..., None, :] <= token[..., None], like.dtype)
        self.before = cast(token[..., None, :] < token[..., None], like.dtype)

    @cached_property
    def pairs(self) -> Array:
        """D, and 0 above the diagonal: (c, n, C, C), or (1, 1, C, C) without gates."""
        if self.g is None:
            return self.until
        xp = namespace(self.g)
        # Column j accumulates the gates of the tokens after j.
        after = self.before * xp.where(self.g < FORGOTTEN, FORGOTTEN, self.g)
        sums = self.ops.accumulate(after, -2)
        return self.ops.multiply(self.ops.exp(sums), self.until)

    def scores(self, x: Array, y: Array) -> Array:
        """Σ_c x_ic D_ij y_jc: x (c, n, C, r, d), y (c, n, C, d) to (c, n, C r, C)."""
        return self._decayed(self.ops.product(flat(x), transpose(y)))

    def _decayed(self, scores: Array) -> Array:
        """D ∘ scores, in `scores` where the library can."""
        if scores.shape[-2] == scores.shape[-1]:
            return self.ops.multiply(scores, self.pairs)
        by_row = self.ops.multiply(_by_row(scores), self.pairs[..., :, None, :])
        return namespace(scores).reshape(by_row, scores.shape)

    def pull(
        self, scores: Array, d_scores: Array, x: Array, y: Array, d_x: Array, d_y: Array
    ) -> tuple[Array, Array, Array]:
        """The gradients of x and y, added to d_x and d_y, and Σ dx ∘ x of the pairs (c, n, C, C).

        The scores of x and y, and their gradient, are overwritten.
        """
        pairs = summed_rows(_by_row(self.ops.multiply(scores, d_scores)))
        d_scores = self._decayed(d_scores)
        d_x = self.ops.add_product(flat(d_x), d_scores, y)
        d_y = self.ops.add_product(d_y, transpose(d_scores), flat(x))
        return namespace(x).reshape(d_x, x.shape), d_y, pairs

    def d_g(self, within: Array, read: Array, written: Array, kept: Array) -> Array:
        # Gate t separates the pairs j < t ≤ i.
        crossing = self.ops.product(within, transpose(self.before[0, 0, ...]))
        within = namespace(within).sum(self.ops.multiply(crossing, self.until), axis=-2)
        return super().d_g(within[..., None], read, written, kept)

    def by_gate(self, x: Array) -> Array:
        return row_sum(x)


def _by_row(scores: Array) -> Array:
    """(c, n, C r, C) as (c, n, C, r, C)."""
    c, n, _, size = scores.shape
    return namespace(scores).reshape(scores, (c, n, size, -1, size))
