"""How the tokens of a chunk fade from one another, with one decay for all of a state.

    D_ij = e^{g_{j+1} + … + g_i}  (j ≤ i),    reading_i = e^{g_1 + … + g_i},
    writing_j = e^{g_{j+1} + … + g_C},        total = e^{g_1 + … + g_C}.

Every exponent is the sum of the gates it consists of, and none is a difference of sums: a strong
gate costs the weak ones behind it no digits, and one of −∞, at which everything is forgotten, needs
no case of its own. The gradient of a gate is a sum of the same kind, over the pairs of tokens that
it stands between.

Arrays are of chunks, (c, n, C, …): the chunks first, then the heads of all sequences.
"""

from __future__ import annotations

from functools import cached_property

from precondattn.arrays import Array, arange_like, cast, namespace
from precondattn_portable.arithmetic import Arithmetic


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
    """x (c, n, C, w) or of r rows a token (c, n, C, r, w), times the factor of each token."""
    if factor is None:
        return x
    return x * (factor if x.ndim == factor.ndim else factor[..., None, :])


class HeadDecay:
    """Of gates (c, n, C, 1), or of none."""

    def __init__(self, ops: Arithmetic, g: Array | None, like: Array) -> None:
        self.ops = ops
        size = like.shape[2]
        self.until = cast(lower_triangle(size, like), like.dtype)
        self.before = cast(lower_triangle(size, like, -1), like.dtype)
        self.g = g
        self.reading: Array | None = None
        """(c, n, C, 1), None for ones; and so `writing` and `total` (c, n, 1, 1)."""
        self.writing: Array | None = None
        self.total: Array | None = None
        if g is not None:
            xp = namespace(g)
            self.reading = xp.exp(xp.cumulative_sum(g, axis=-2))
            self.writing = xp.exp(sums_after(g))
            self.total = self.reading[:, :, -1:, :]

    def kept(self, chunk: int) -> Array | None:
        """What a chunk keeps of the state, None for all of it."""
        return None if self.total is None else self.total[chunk, ...]

    @cached_property
    def pairs(self) -> Array:
        """D, and 0 above the diagonal: (c, n, C, C), or (C, C) without gates."""
        if self.g is None:
            return self.until
        xp = namespace(self.g)
        # Down the column of token j the gates behind it add up.
        after = xp.where(self.before > 0, self.g, 0.0)
        sums = xp.cumulative_sum(after, axis=-2)
        return self.ops.multiply(self.ops.exp(sums), self.until)

    def among(self, scores: Array) -> Array:
        """D ∘ scores (c, n, C r, C), in them where the library can."""
        if scores.shape[-2] == scores.shape[-1]:
            return self.ops.multiply(scores, self.pairs)
        xp = namespace(scores)
        size = scores.shape[-1]
        by_row = xp.reshape(scores, (*scores.shape[:2], size, -1, size))
        return xp.reshape(self.ops.multiply(by_row, self.pairs[..., :, None, :]), scores.shape)

    def d_g(self, pairs: Array, read: Array, written: Array, kept: Array) -> Array:
        """The gradient of the gates (c, n, C, 1), from Σ dx ∘ x of what they are factors of.

        Of pairs of tokens (c, n, C, C), of what the tokens read from the state before the chunk
        and wrote to that behind it (c, n, C, 1), and of what the one keeps of the other
        (c, n, 1, 1).
        """
        xp = namespace(pairs)
        # Gate t is in the pairs j < t ≤ i.
        crossing = self.ops.product(pairs, xp.matrix_transpose(self.before))
        crossing = xp.sum(self.ops.multiply(crossing, self.until), axis=-2)[..., None]
        return crossing + sums_from(read) + sums_before(written) + kept
