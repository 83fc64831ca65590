"""The preconditioned key of ATK, with A computed by one product for each short chunk of tokens.

    A   = (D_ij β_j) (k_j ∘ k_j) + e^{g_1 + … + g_i} A_before,    D as in `head_decay.py`,
    out = k ∘ (1/x)^{r / (1 + |r|)},                              r = log(A + ε) − c.

A is a vector per key head. So a chunk costs 2 C d operations per token, its state costs next to
nothing, and short chunks are fastest. A at the ends of chunks is such a product too, with chunks in
place of tokens, without a loop over them. The rest is a logarithm and an exponential for every
entry of k, computed while A is in a CPU's cache.
"""

from __future__ import annotations

import math

from precondattn.arrays import Array, Arrays, Residuals, namespace
from precondattn.frame import Frame
from precondattn.spec.array_functions import transpose, where_valid
from precondattn.spec.linear_family import forget_other_segments
from precondattn.spec.preconditioned_key import PreconditionedKey as Leaf
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.arithmetic import stored
from precondattn_portable.head_decay import HeadDecay
from precondattn_portable.layout import blocks, budget, padded, time_first
from precondattn_portable.stateful import StatefulAlgorithm

KEY_CHUNK = 16
"""Tokens of a chunk."""

LARGEST_CENTER = 30
"""|c|, up to which A is computed with a factor e^{−c}."""

LEAST_EPS = 1e-30
"""ε, down to which it may be multiplied by that factor: a normal number in float32."""

MOST_CHUNKS = 64
"""The most chunks that are computed together. With c of them, computing A before each costs
another 2 c d / 16 operations per token."""


class PreconditionedKeyChunks(StatefulAlgorithm[Leaf]):
    """Algorithm of `PreconditionedKey`. Gradient and extension are those of the recurrence."""

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        xp, ops, (b, s, h, d) = namespace(x["k"]), self.ops, x["k"].shape
        out, squares = ops.empty(x["k"].shape, x["k"]), ops.zeros((b * h, 1, d), x["k"])
        together = min(
            max(budget(ops.sizes.chunk_entries) // (b * h * d * KEY_CHUNK), 1), MOST_CHUNKS
        )
        keys = time_first(x["k"])
        arrays = (keys, where_valid(keys, frame), time_first(out), *gates_and_weights(x, frame))
        whole = s - s % KEY_CHUNK
        for low, high, size in ((0, whole, KEY_CHUNK), (whole, s, s - whole)):
            if low == high:
                continue
            k, counted, written, g, beta = (
                _chunks(array[:, :, low:high, :], size) for array in arrays
            )
            g, beta = (xp.reshape(array, (-1, b * h, size, 1)) for array in (g, beta))
            chunks = PreconditionedChunks(self, x, g, beta, together)
            for block, (start, stop) in enumerate(blocks(k.shape[0], together)):
                index = (slice(start, stop), ...)
                m, squares = chunks.multipliers(block, counted[index], squares)
                view = written[index]
                m = xp.reshape(m, view.shape)
                stored(written, index, view, ops.multiplied(m, k[index], view))
        return out, ()


def gates_and_weights(x: Arrays, frame: Frame) -> tuple[Array, Array]:
    """g and β (b, h, s, 1), −∞ where a segment begins."""
    g = forget_other_segments(time_first(x["g_atk"])[..., None, None], frame)
    return g[..., 0], time_first(x["beta_atk"])[..., None]


class PreconditionedChunks:
    """A in chunks of C tokens, and the preconditioned keys.

    Arrays are (c, n, C, …): chunks first, then the heads of all sequences. `together` of the c are
    one block.
    """

    def __init__(
        self, of: Algorithm[Leaf], x: Arrays, g: Array, beta: Array, together: int
    ) -> None:
        """Decays from g and β (c, n, C, 1); c is the leaf's, or, if learnt, an input in x."""
        xp, (count, rows, *_), ops, leaf = namespace(g), g.shape, of.ops, of.leaf
        self.ops, self.bound, self.together = ops, leaf.bound, together
        self.center: Array = leaf.center
        scale, self.eps = 1.0, leaf.eps
        if leaf.learned:
            c = x["log_atk_scale"]
            each = xp.broadcast_to(c, (rows // c.shape[0], c.shape[0]))
            self.center = xp.reshape(each, (rows, 1, 1))
        elif abs(leaf.center) <= LARGEST_CENTER:
            # log(A + ε) − c is log(e^{−c} A + e^{−c} ε), which needs no subtraction.
            factor = math.exp(-leaf.center)
            if factor * leaf.eps >= LEAST_EPS:
                self.center, scale, self.eps = None, factor, factor * leaf.eps
        self.scratch = ops.scratch(0, g)
        decay = HeadDecay(ops, g, g)
        self.reading = decay.reading
        self.factors = ops.multiply(decay.pairs, transpose(scale * beta))
        """(c, n p, C, C)"""

        sums = padded(xp.sum(g, axis=(-2, -1)), 0, -count % together, axis=0)
        sums = xp.permute_dims(xp.reshape(sums, (-1, together, rows)), (0, 2, 1))[..., None]
        between = HeadDecay(ops, sums, sums)
        self.between = xp.concat([between.reading, between.pairs], axis=-1)
        """(blocks, n, together, 1 + together): the decays between the chunks of a block"""

    def multipliers(self, block: int, k: Array, squares: Array) -> tuple[Array, Array]:
        """The factors of a block's keys, which the next call may overwrite, and A after the block.

        Keys that A does not count are 0. They may have two axes for the rows n, unlike the factors.
        `squares` (n, 1, d) is e^{−c} A of the token before the block.
        """
        ops, xp = self.ops, namespace(squares)
        start, count = block * self.together, k.shape[0]
        index = (slice(start, start + count), ...)
        factors, reading = self.factors[index], self.reading[index]
        _, rows, size, _ = factors.shape
        d = k.shape[-1]
        shape = (count, rows, size, d)
        added = xp.reshape(ops.multiplied(k, k, self.scratch.shaped(k.shape)), shape)
        a = ops.product(factors, added, self.scratch.shaped(shape, "multipliers"))

        # A follows the same recurrence from chunk to chunk as from token to token.
        written = xp.permute_dims(a[..., -1, :], (1, 0, 2))
        between = self.between[block, :, :count, : count + 1]
        after = ops.product(between, xp.concat([squares, written], axis=1))
        before = xp.permute_dims(xp.concat([squares, after[:, :-1, :]], axis=1), (1, 0, 2))
        a = ops.add_multiple(a, reading, before[:, :, None, :])

        r = ops.log(ops.add(a, self.eps))
        if self.center is not None:
            r = ops.subtract(r, self.center)
        return ops.softsign_power(1 / self.bound, r, added), after[:, -1:, :]


def _chunks(x: Array, size: int) -> Array:
    """Tokens (b, h, s, w) as (c, b, h, C, w)."""
    xp, (b, h, _, width) = namespace(x), x.shape
    return xp.permute_dims(xp.reshape(x, (b, h, -1, size, width)), (2, 0, 1, 3, 4))
