"""The preconditioned key of ATK, of which A + ε is one product for each short chunk of tokens.

    A + ε = e^{g_1 + … + g_i} A_before + [ε | D_ij β_j] [1; k_j ∘ k_j],    D as in `head_decay.py`,
    out   = k ∘ exp(−log x · r / (1 + |r|)),                                r = log(A + ε) − c.

A is a vector for each key head. So a chunk costs 2 C d operations for each token and the state next
to nothing, and short chunks are the fastest. A at the ends of chunks is such a product again, with
chunks for tokens: no loop runs over them. What is left is a logarithm and an exponential of every
entry of k. They are computed where the product has left A: in the cache.
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
from precondattn_portable.in_place import multiply_at
from precondattn_portable.layout import budget, padded, time_first
from precondattn_portable.stateful import StatefulAlgorithm

CHUNK = 16
"""Tokens of a chunk."""

TOGETHER = 2**19
"""Entries of k that are computed together: 2 MiB in float32."""

MOST_CHUNKS = 64
"""Chunks that are computed together at most: each token costs as many operations again."""


class PreconditionedKeyChunks(StatefulAlgorithm):
    """Algorithm of `PreconditionedKey`. Gradient and extension are those of the recurrence."""

    def forward(
        self, ops: Arithmetic, leaf: Any, x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        b, s, h, d = x["k"].shape
        out, squares = ops.empty(x["k"].shape, x["k"]), ops.zeros((b * h, 1, d), x["k"])
        together = min(max(budget(TOGETHER) // (b * h * d * CHUNK), 1), MOST_CHUNKS)
        whole = s - s % CHUNK
        for low, high, size in ((0, whole, CHUNK), (whole, s, s - whole)):
            if low < high:
                chunks = _Chunks(ops, leaf, x, frame, low, high, size, together)
                for block in range(chunks.between.shape[0]):
                    squares = chunks.write(out, squares, block)
        return out, ()


class _Chunks:
    """Tokens low … high − 1 of a call in chunks of `size`, (c, b, h, C, …)."""

    def __init__(
        self,
        ops: Arithmetic,
        leaf: PreconditionedKey,
        x: Mapping[str, Array],
        frame: Frame,
        low: int,
        high: int,
        size: int,
        together: int,
    ) -> None:
        xp = namespace(x["k"])
        self.ops, self.leaf, self.low, self.size, self.together = ops, leaf, low, size, together
        self.scratch = ops.scratch(0, x["k"])

        def chunks(tokens: Array) -> Array:
            b, h, _, width = tokens.shape
            tokens = xp.reshape(tokens[:, :, low:high, :], (b, h, -1, size, width))
            return xp.permute_dims(tokens, (2, 0, 1, 3, 4))

        k = time_first(x["k"])
        self.k, self.counted = chunks(k), chunks(where_valid(k, frame))
        self.center: Any = leaf.center
        if leaf.learned:
            self.center = xp.reshape(x["log_atk_scale"], (1, 1, -1, 1, 1))

        count, b, h = self.k.shape[:3]
        gates = forget_other_segments(time_first(x["g_atk"])[..., None, None], frame)[..., 0]
        g, beta = (
            xp.reshape(chunks(array), (count, b * h, size, 1))
            for array in (gates, time_first(x["beta_atk"])[..., None])
        )
        decay = HeadDecay(ops, g, g)
        self.reading = decay.reading
        self.factors = ops.empty((count, b * h, size, size + 1), self.k)
        self.factors[..., :1] = leaf.eps
        self.factors[..., 1:] = ops.multiply(decay.pairs, transpose(beta))

        sums = padded(xp.sum(g, axis=(-2, -1)), 0, -count % together, axis=0)
        gates = xp.permute_dims(xp.reshape(sums, (-1, together, b * h, 1)), (0, 2, 1, 3))
        between = HeadDecay(ops, gates, gates)
        self.between = xp.concat([between.reading, between.pairs], axis=-1)
        """(blocks, b h, together, 1 + together): the decays between the chunks of each block"""

    def write(self, out: Array, squares: Array, block: int) -> Array:
        """Write the keys of a block of chunks to `out` (b, s, h, d); A after them.

        A (b h, 1, d) is that of the token before them.
        """
        ops, xp, size = self.ops, namespace(squares), self.size
        start = block * self.together
        here = slice(start, start + self.together)
        k, counted = self.k[here, ...], self.counted[here, ...]
        count, b, h, _, d = k.shape
        filled = self._workspace("filled", (count, b, h, size + 1, d), squares)
        filled[..., 0, :] = 1.0
        multiply_at(ops, filled, (..., slice(1, None), slice(None)), counted, counted)
        filled = xp.reshape(filled, (count, b * h, size + 1, d))
        r = self._workspace("r", (count, b * h, size, d), squares)
        r = ops.product(self.factors[here, ...], filled, r)

        # A is among chunks what it is among tokens.
        written = xp.permute_dims(r[:, :, -1, :], (1, 0, 2)) - self.leaf.eps
        between = self.between[block, :, :count, : count + 1]
        ends = xp.concat(
            [squares, ops.product(between, xp.concat([squares, written], axis=1))], axis=1
        )
        before = xp.permute_dims(ends[:, :-1, :], (1, 0, 2))[:, :, None, :]
        r = ops.add_multiple(r, self.reading[here, ...], before)

        r = xp.reshape(ops.log(r), k.shape)
        r = ops.subtract(r, self.center)
        softened = ops.softsign(r, self._workspace("softened", r.shape, squares))
        m = ops.exp(softened, -math.log(self.leaf.bound))
        low = self.low + start * size
        tokens = xp.reshape(out[:, low : low + count * size, ...], (b, count, size, h, d))
        multiply_at(ops, xp.permute_dims(tokens, (1, 0, 3, 2, 4)), ..., m, k)
        return ends[:, -1:, :]

    def _workspace(self, name: str, shape: tuple[int, ...], like: Array) -> Array:
        found = self.scratch.shaped(shape, name)
        return self.ops.empty(shape, like) if found is None else found
