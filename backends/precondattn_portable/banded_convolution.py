"""A convolution over tokens as products with a band matrix, block by block.

    y_i = Σ_a w_a x_{i + a − left}        (0 where there is no such token)

A block of L tokens of y is the product of a band matrix, with w_a at (i, i + a), and a window of
L + c − 1 tokens of x. The band matrix is made by reshaping a matrix that has w in its first c
columns, and 0 in the others:

    (L, L + c)  →  flat, without the last L entries  →  (L, L + c − 1)

The gradient of w sums the diagonals of dy xᵀ. The reverse reshaping turns diagonals into columns.

Libraries have convolutions of their own. With heads as channels they are slower, and PyTorch's
gradient of w is wrong in float32 on a CPU (PyTorch 2.13: by up to 0.3 of it with 63 weights).
"""

from __future__ import annotations

from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import transpose
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.layout import padded

TOKENS = 64
"""Tokens of a block, if the sequence has so many, and if there are no more weights than this."""


def convolved(ops: Arithmetic, v: Array, weight: Array) -> Array:
    """y (b, h, t, e) from v (b, h, t, e) and w (h, c), centred on the token."""
    return _convolved(ops, v, weight, weight.shape[1] // 2)


def convolved_vjp(ops: Arithmetic, v: Array, weight: Array, d_y: Array) -> tuple[Array, Array]:
    """The gradients of v and of w."""
    xp, c = namespace(v), weight.shape[1]
    d_v = _convolved(ops, d_y, xp.flip(weight, axis=1), c - 1 - c // 2)
    windows = _windows(v, c, c // 2)
    size = windows.shape[3] - c + 1
    pairs = ops.product(_blocks(d_y, size), transpose(windows))
    flat = xp.reshape(pairs, (*pairs.shape[:3], -1))
    rows = xp.reshape(padded(flat, 0, size, axis=3), (*pairs.shape[:3], size, size + c))
    return d_v, xp.sum(rows[..., :c], axis=(0, 2, 3))


def _size(t: int, c: int) -> int:
    """Tokens of a block."""
    return max(min(TOKENS, t), c)


def _convolved(ops: Arithmetic, x: Array, weight: Array, left: int) -> Array:
    xp, (b, h, t, e), c = namespace(x), x.shape, weight.shape[1]
    size = _size(t, c)
    first = xp.broadcast_to(weight[:, None, :], (h, size, c))
    flat = xp.reshape(padded(first, 0, size, axis=2), (h, size * (size + c)))
    band = xp.reshape(flat[:, : size * (size + c - 1)], (1, h, 1, size, size + c - 1))
    y = ops.product(band, _windows(x, c, left))
    return xp.reshape(y, (b, h, -1, e))[:, :, :t, :]


def _blocks(x: Array, size: int) -> Array:
    """(b, h, t, e) as (b, h, blocks, size, e), with zeros after the last token."""
    b, h, t, e = x.shape
    return namespace(x).reshape(padded(x, 0, -t % size), (b, h, -1, size, e))


def _windows(x: Array, c: int, left: int) -> Array:
    """The window of tokens that each block of y reads (b, h, blocks, size + c − 1, e)."""
    size, t = _size(x.shape[2], c), x.shape[2]
    after = (-(-t // size) + 1) * size - t - left
    blocks = _blocks(padded(x, left, after), size)
    return namespace(x).concat([blocks[:, :, :-1, ...], blocks[:, :, 1:, : c - 1, :]], axis=3)
