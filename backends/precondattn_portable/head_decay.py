"""The decay between the tokens of a chunk, with one decay for the whole state.

    D_ij = e^{g_{j+1} + … + g_i}  (j ≤ i),    reading_i = e^{g_1 + … + g_i},
    writing_j = e^{g_{j+1} + … + g_C},        total = e^{g_1 + … + g_C}.

Every exponent is the sum of its own gates and never a difference of sums. So a strong gate costs
the weak gates after it no accuracy, and a gate of −∞, which forgets everything, is no special case.
The gradient of a gate is such a sum too, over the pairs of tokens that it separates.

Arrays are in chunks, (c, n, C, …): the chunks first, then the heads of all sequences.
"""

from __future__ import annotations

from functools import cached_property

from precondattn.arrays import Array, arange_like, cast, namespace
from precondattn_portable.arithmetic import Arithmetic

FORGOTTEN = -1e4
"""A gate below it is as good as −∞: e^g is 0 in every precision. It can be multiplied by 0."""


def lower_triangle(size: int, like: Array, k: int = 0) -> Array:
    """(C, C), true up to the k-th diagonal."""
    token = arange_like(size, like)
    return token[None, :] <= token[:, None] + k


def sums_before(x: Array) -> Array:
    """Σ_{j<i} x_j over tokens (…, C, w)."""
    return namespace(x).cumulative_sum(x, axis=-2, include_initial=True)[..., :-1, :]


def sums_from(x: Array, axis: int = -2) -> Array:
    """Σ_{j≥i} x_j over tokens (…, C, w)."""
    xp = namespace(x)
    return xp.flip(xp.cumulative_sum(xp.flip(x, axis=axis), axis=axis), axis=axis)


def sums_after(x: Array) -> Array:
    """Σ_{j>i} x_j over tokens (…, C, w)."""
    xp = namespace(x)
    return sums_from(xp.concat([x[..., 1:, :], xp.zeros_like(x[..., :1, :])], axis=-2))


def decayed(x: Array, factor: Array | None) -> Array:
    """x (c, n, C, w), or with r rows per token (c, n, C, r, w), times the factor of each token."""
    if factor is None:
        return x
    return x * (factor if x.ndim == factor.ndim else factor[..., None, :])


class HeadDecay:
    """Decays of gates (c, n, C, 1), or of none."""

    def __init__(self, ops: Arithmetic, g: Array | None, like: Array) -> None:
        self.ops = ops
        size = like.shape[2]
        self.until = cast(lower_triangle(size, like), like.dtype)
        self.before = cast(lower_triangle(size, like, -1), like.dtype)
        self.g = g
        self.reading: Array | None = None
        """(c, n, C, 1), None for ones; likewise `writing`, and `total` (c, n, 1, 1)."""
        self.writing: Array | None = None
        self.total: Array | None = None
        if g is not None:
            xp = namespace(g)
            self.reading = xp.exp(xp.cumulative_sum(g, axis=-2))
            self.writing = xp.exp(sums_after(g))
            self.total = self.reading[:, :, -1:, :]

    def kept(self, chunk: int) -> Array | None:
        """The factor of the state over a chunk; None for 1."""
        return None if self.total is None else self.total[chunk, ...]

    @cached_property
    def pairs(self) -> Array:
        """D, and 0 above the diagonal: (c, n, C, C), or (C, C) without gates."""
        if self.g is None:
            return self.until
        xp = namespace(self.g)
        # In the column of token j, the gates after j are summed.
        after = self.before * xp.where(self.g < FORGOTTEN, FORGOTTEN, self.g)
        sums = self.ops.accumulate(after, axis=-2)
        return self.ops.multiply(self.ops.exp(sums), self.until)

    def among(self, scores: Array) -> Array:
        """D ∘ scores (c, n, C r, C), in `scores` where the library can."""
        if scores.shape[-2] == scores.shape[-1]:
            return self.ops.multiply(scores, self.pairs)
        xp = namespace(scores)
        size = scores.shape[-1]
        by_row = xp.reshape(scores, (*scores.shape[:2], size, -1, size))
        return xp.reshape(self.ops.multiply(by_row, self.pairs[..., :, None, :]), scores.shape)

    def d_g(self, pairs: Array, read: Array, written: Array, kept: Array) -> Array:
        """The gradient of the gates (c, n, C, 1), from Σ dx ∘ x of everything they multiply.

        `pairs` (c, n, C, C) is that sum for pairs of tokens, `read` and `written` (c, n, C, 1) for
        reads of the state before the chunk and writes to the state after it, and `kept`
        (c, n, 1, 1) for the decayed state.
        """
        xp = namespace(pairs)
        # Gate t separates the pairs j < t ≤ i.
        crossing = self.ops.product(pairs, xp.matrix_transpose(self.before))
        crossing = xp.sum(self.ops.multiply(crossing, self.until), axis=-2)[..., None]
        return crossing + sums_from(read) + sums_before(written) + kept
