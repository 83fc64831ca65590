"""The preconditioned key of ATK, of which A + ε is one product for each short chunk of tokens.

    A + ε = [ε | e^{g_1 + … + g_i} | D_ij β_j] [1; A_before; k_j ∘ k_j],    D as in `head_decay.py`,
    out   = k ∘ exp(−log x · r / (1 + |r|)),                                r = log(A + ε) − c.

A is a vector for each key head. So a chunk costs 2 C d operations for each token and the state next
to nothing, and short chunks are the fastest. What is left is a logarithm and an exponential of
every entry of k. They are computed where the product has left A: in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from precondattn.arrays import Array, Residuals, namespace
from precondattn.frame import Frame
from precondattn.spec.array_functions import transpose, where_valid
from precondattn.spec.linear_family import forget_other_segments
from precondattn.spec.preconditioned_key import PreconditionedKey
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.head_decay import HeadDecay
from precondattn_portable.in_place import add_kept_at, multiply_at
from precondattn_portable.layout import blocks, budget, time_first
from precondattn_portable.stateful import StatefulAlgorithm

CHUNK = 16
"""Tokens of a chunk."""

TOGETHER = 2**19
"""Entries of k that are computed together: 2 MiB in float32."""


class PreconditionedKeyChunks(StatefulAlgorithm):
    """Algorithm of `PreconditionedKey`. Gradient and extension are those of the recurrence."""

    def forward(
        self, ops: Arithmetic, leaf: Any, x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        b, s, h, d = x["k"].shape
        tokens = _Tokens(ops, leaf, x, frame)
        out, squares = ops.empty(x["k"].shape, x["k"]), ops.zeros((b * h, 1, d), x["k"])
        whole = s - s % CHUNK
        together = max(budget(TOGETHER) // (b * h * d * CHUNK), 1) * CHUNK
        for low, high in blocks(whole, together):
            squares = tokens.write(out, squares, low, high, CHUNK)
        if whole < s:
            tokens.write(out, squares, whole, s, s - whole)
        return out, ()


class _Tokens:
    """The inputs of a call, heads before time (b, h, s, …)."""

    def __init__(
        self, ops: Arithmetic, leaf: PreconditionedKey, x: Mapping[str, Array], frame: Frame
    ) -> None:
        self.ops, self.leaf = ops, leaf
        self.k = time_first(x["k"])
        self.counted = where_valid(self.k, frame)
        self.beta = time_first(x["beta_atk"])[..., None]
        g = time_first(x["g_atk"])[..., None, None]
        self.g = forget_other_segments(g, frame)[..., 0]
        self.center: Any = leaf.center
        if leaf.learned:
            self.center = namespace(self.k).reshape(x["log_atk_scale"], (1, 1, -1, 1, 1))

    def write(self, out: Array, squares: Array, low: int, high: int, size: int) -> Array:
        """Write the keys of tokens low … high − 1 to `out` (b, s, h, d); A of the last one.

        A (b h, 1, d) is that of the token before them, and they are in chunks of `size`.
        """
        ops, xp = self.ops, namespace(squares)
        k = _chunks(self.k, low, high, size)
        count, b, h, _, d = k.shape
        filled = ops.empty((count, b, h, size + 2, d), squares)
        filled[..., 0, :] = 1.0
        counted = _chunks(self.counted, low, high, size)
        multiply_at(ops, filled, (..., slice(2, None), slice(None)), counted, counted)
        filled = xp.reshape(filled, (count, b * h, size + 2, d))

        g, beta = (
            xp.reshape(_chunks(array, low, high, size), (count, b * h, size, 1))
            for array in (self.g, self.beta)
        )
        decay = HeadDecay(ops, g, g)
        factors = ops.empty((count, b * h, size, size + 2), squares)
        factors[..., :1] = self.leaf.eps
        factors[..., 1:2] = decay.reading
        factors[..., 2:] = ops.multiply(decay.pairs, transpose(beta))

        states = ops.empty((count + 1, *squares.shape), squares)
        states[0, ...] = squares
        written = ops.product(factors[..., -1:, 2:], filled[..., 2:, :])
        states[1:, ...] = written
        for chunk in range(count):
            add_kept_at(ops, states, (chunk + 1, ...), states[chunk, ...], decay.kept(chunk))
        filled[..., 1:2, :] = states[:-1, ...]

        r = xp.reshape(xp.log(ops.product(factors, filled)), k.shape)
        r = ops.subtract(r, self.center)
        softened = ops.divide(r, ops.add(xp.abs(r), 1.0))
        m = ops.exp(ops.multiply(softened, -math.log(self.leaf.bound)))
        tokens = xp.reshape(out[:, low:high, ...], (b, count, size, h, d))
        multiply_at(ops, xp.permute_dims(tokens, (1, 0, 3, 2, 4)), ..., m, k)
        return states[-1, ...]


def _chunks(x: Array, low: int, high: int, size: int) -> Array:
    """Some tokens of (b, h, s, w) as (c, b, h, C, w)."""
    xp, (b, h, _, width) = namespace(x), x.shape
    tokens = xp.reshape(x[:, :, low:high, :], (b, h, -1, size, width))
    return xp.permute_dims(tokens, (2, 0, 1, 3, 4))
