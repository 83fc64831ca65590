"""Landmarks: means of m segments of tokens.

    x̃_j = Σ_i M_ji x_i,    M_ji = [⌊r_i m / L⌋ = j] / (number of tokens of segment j)

for the token with rank r_i among the L tokens of its sequence. Segments differ by at most one
token. With L < m every token is a segment of its own, and the others are empty: their rows are 0.
"""

from __future__ import annotations

from typing import NamedTuple

from precondattn.arrays import Array, arange_like, cast, namespace


class Means(NamedTuple):
    """The matrix M and which of its rows are not 0."""

    matrix: Array
    """(b or 1, 1, m, tokens)"""
    is_any: Array
    """(b or 1, m)"""


def segment_means(
    m: int, like: Array, members: Array | None = None, counted: Array | None = None
) -> Means:
    """The means of x (b, heads, tokens, d) like `like`.

    `members` (b, tokens) are the tokens of the sequence, which are divided into segments; `counted`
    are those of them that a mean is of.
    """
    xp, tokens = namespace(like), like.shape[2]
    if members is None:
        segment = arange_like(tokens, like)[None, :] * m // tokens
    else:
        ones = cast(members, xp.int32)
        rank = xp.cumulative_sum(ones, axis=1, dtype=xp.int32) - 1
        length = xp.sum(ones, axis=1, keepdims=True, dtype=xp.int32)
        segment = rank * m // xp.clip(length, min=1)
    is_in = segment[:, None, :] == arange_like(m, like)[None, :, None]
    for mask in (members, counted):
        is_in = is_in if mask is None else is_in & mask[:, None, :]
    matrix = cast(is_in, like.dtype)
    total = xp.sum(matrix, axis=2, keepdims=True)
    matrix = matrix / xp.clip(total, min=1.0)
    return Means(matrix[:, None, :, :], total[:, :, 0] > 0)
