"""A convolution over tokens with c weights for each head, centred on the token.

    y_i = Σ_a w_a v_{i + a − ⌊c/2⌋},    0 where there is no such token

Gradient: dv_j = Σ_a w_a dy_{j − a + ⌊c/2⌋},    dw_a = Σ_i dy_i · v_{i + a − ⌊c/2⌋}.
"""

from __future__ import annotations

from collections.abc import Iterator

from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import moved


def overlaps(tokens: int, width: int) -> Iterator[tuple[int, slice, slice]]:
    """Each weight's number, and the tokens of y and of v that it relates."""
    for a in range(width):
        shift = a - width // 2
        if abs(shift) < tokens:
            low, high = max(0, -shift), tokens - max(0, shift)
            yield a, slice(low, high), slice(low + shift, high + shift)


def convolved(v: Array, weight: Array) -> Array:
    """y (b, h, t, e) from v (b, h, t, e) and w (h, c)."""
    width = weight.shape[1]
    rows = [moved(v, a - width // 2, axis=2) for a in range(width)]
    return sum(weight[None, :, None, a, None] * row for a, row in enumerate(rows))


def convolved_vjp(v: Array, weight: Array, d_y: Array) -> tuple[Array, Array]:
    """The gradients of v and of w."""
    xp = namespace(v)
    d_v = xp.zeros_like(v)
    d_weight = [xp.zeros_like(weight[:, 0])] * weight.shape[1]
    for a, into, of in overlaps(v.shape[2], weight.shape[1]):
        d_rows, zero = d_y[:, :, into, :], xp.zeros_like(v)
        d_term = weight[None, :, None, a, None] * d_rows
        parts = [zero[:, :, : of.start, :], d_term, zero[:, :, of.stop :, :]]
        d_v = d_v + xp.concat(parts, axis=2)
        d_weight[a] = xp.sum(d_rows * v[:, :, of, :], axis=(0, 2, 3))
    return d_v, xp.stack(d_weight, axis=1)
