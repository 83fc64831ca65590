"""CCQ with covariances over each query's visible keys, one tile of scores at a time.

    q^c = q̄ − λ c,    c = Σ_j p_j (s_j − s̄) k̄_j,    p = softmax(s / τ),    s = q̄ k̄ᵀ

The mean key μ = Σ p k̄ is computed first, as attention with values k̄; then s̄ = q̄·μ. Backward, with
h = −λ g and u = h k̄ᵀ, centred by ū = h·μ, and with the covariance of s and u, which is h·c:

    ds = p ∘ (u − ū) + p ∘ ((s − s̄)(u − ū) − h·c) / τ,
    dq̄ = g + ds k̄,    dk̄ = (p ∘ (s − s̄))ᵀ h + dsᵀ q̄.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

import precondattn as pa
from precondattn.arrays import Arrays, Residuals, Tree
from precondattn.frame import Frame
from precondattn.spec.array_functions import row_sum
from precondattn.spec.l2_norm import l2_norm, l2_norm_vjp
from precondattn_jax.arithmetic import product, product_with_transposed, transposed_product, zeros
from precondattn_jax.definition import SteppingAsDefined
from precondattn_jax.dot_scores import DotScores
from precondattn_jax.layout import BlockedCall
from precondattn_jax.loops import Loops
from precondattn_jax.masks import Mask
from precondattn_jax.read_mean import MeanRead, MeanState
from precondattn_portable.layout import zero_padding


class QueryWeightedView(BlockedCall[pa.QueryWeightedQuery]):
    """The unit queries and keys of a call, in blocks."""

    def __init__(self, leaf: pa.QueryWeightedQuery, x: Arrays, frame: Frame, loops: Loops) -> None:
        units = {name: l2_norm(x[name], leaf.eps) for name in ("q", "k")}
        super().__init__(leaf, x | units, frame)
        self.loops, self.k, self.q = loops, self.of_keys("k"), self.stacked(units["q"])
        self.contraction = self.stacked(x["contraction"][..., None])
        self.scores = DotScores(self.blocks, self.q, self.k)
        self.mask = Mask(frame, self.blocks)

    def scores_of(self, rows: Array, a: Array, j: Array, *, diagonal: bool) -> tuple[Array, Array]:
        """s of a tile, and s / τ with −∞ at masked pairs."""
        s = self.scores.tile(rows, j)
        return s, self.mask.apply(s / self.leaf.tau, a, j, diagonal=diagonal)

    def over_tiles(self, a: Array, add: Callable[..., Tree], state: Tree) -> Tree:
        """Apply add(state, j, diagonal) to all tiles of block a."""
        first = self.mask.first(a)
        state = self.loops.counted(
            self.blocks.keys, a - first, lambda i, state: add(state, first + i, False), state
        )
        return add(state, a, True)

    def of_block(self, a: Array) -> tuple[Array, Array, Array]:
        """c, μ and the logarithm of the sum of weights, for a block of queries."""
        q, read = self.blocks.row(self.q, a), MeanRead()

        def mean(state: MeanState, j: Array, diagonal: bool) -> MeanState:
            _, logits = self.scores_of(q, a, j, diagonal=diagonal)
            return read.add(state, logits, self.blocks.take(self.k, j))

        mu, log_total = read.finish(self.over_tiles(a, mean, read.start(q.shape, self.k)))
        mean_score = row_sum(q * mu)

        def centred(c: Array, j: Array, diagonal: bool) -> Array:
            s, logits = self.scores_of(q, a, j, diagonal=diagonal)
            weights = jnp.exp(logits - log_total) * (s - mean_score)
            return c + product(weights, self.blocks.take(self.k, j))

        return self.over_tiles(a, centred, zeros(q.shape, q)), mu, log_total


class QueryWeighted(SteppingAsDefined[pa.QueryWeightedQuery]):
    """Algorithm of `QueryWeightedQuery`."""

    name = "row blocks"

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        view = QueryWeightedView(self.leaf, x, frame, self.loops)
        c = self.loops.each(lambda a: view.of_block(a)[0], view.blocks.rows)
        out = view.blocks.unstacked(view.q - view.contraction * c, view.r)
        return zero_padding(out, frame), ()

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        leaf = self.leaf
        view = QueryWeightedView(leaf, x, frame, self.loops)
        blocks = view.blocks
        cotangents = view.stacked(zero_padding(cotangent, frame))

        def of_block(d_k: Array, a: Array) -> tuple[Array, tuple[Array, Array]]:
            q, g, contraction = (
                blocks.row(stack, a) for stack in (view.q, cotangents, view.contraction)
            )
            c, mu, log_total = view.of_block(a)
            h = -contraction * g
            mean_score, mean_u, covariance = row_sum(q * mu), row_sum(h * mu), row_sum(h * c)

            def pull(carry: tuple[Array, Array], j: Array, diagonal: bool) -> tuple[Array, Array]:
                d_q, d_k = carry
                s, logits = view.scores_of(q, a, j, diagonal=diagonal)
                keys = blocks.take(view.k, j)
                u = product_with_transposed(h, keys) - mean_u
                p = jnp.exp(logits - log_total)
                weighted = p * (s - mean_score)
                d_s = p * u + (weighted * u - p * covariance) / leaf.tau
                d_keys = transposed_product(weighted, h) + transposed_product(d_s, q)
                return d_q + product(d_s, keys), blocks.add(d_k, j, d_keys)

            d_q, d_k = view.over_tiles(a, pull, (g, d_k))
            return d_k, (d_q, -row_sum(g * c))

        d_k, (d_q, d_contraction) = lax.scan(of_block, zeros(view.k.shape, view.k), blocks.rows)
        return {
            "q": l2_norm_vjp(x["q"], leaf.eps, blocks.unstacked(d_q, view.r)),
            "k": l2_norm_vjp(x["k"], leaf.eps, view.tokens(d_k)),
            "contraction": blocks.unstacked(d_contraction, view.r)[..., 0],
        }
