"""Tiles of PaTH's scores, and their gradient: `precondattn_portable.transported` has the formulas.

Within block a, with B = tril(q wᵀ), R = stril(w kᵀ) and Z = (I + diag(β) stril(w wᵀ))⁻¹ diag(β),

    Q̃ = q − B (Z w),    K̃ = k − (Z R)ᵀ w,    P = I − wᵀ (Z w),    A_aa = q kᵀ − B (Z R),

and queries are carried from block to block:  x_{a−1} = Q̃_a,  x_{b−1} = x_b P_b,  A_ab = x_b K̃_bᵀ.
Backward, with dA_ab = D_b, for b = 0, 1 … a − 1:

    dK̃_b += D_bᵀ x_b,    dP_b += x_bᵀ y_{b−1},    y_b = D_b K̃_b + y_{b−1} P_bᵀ,    dQ̃_a = y_{a−1}.

The matrices of a single block remain; JAX differentiates them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from precondattn.arrays import Tree
from precondattn.spec.array_functions import identity_like
from precondattn.spec.lucid import LucidSolve
from precondattn.spec.metric import DOT
from precondattn.spec.softmax import SoftmaxAttention
from precondattn_jax.arithmetic import product, product_with_transposed, transposed_product, zeros
from precondattn_jax.dot_scores import DotScores, Pulled, Step, Sums
from precondattn_jax.layout import BlockedCall, QueryBlocks
from precondattn_jax.loops import PLAIN, Loops
from precondattn_jax.triangular_inverse import unit_lower_inverse


class BlockReflections(NamedTuple):
    """Matrices of a block (b, n, …), or of all (blocks, b, n, …), that depend on the keys alone."""

    keys: Array
    """K̃"""
    whole: Array
    """P"""
    zr: Array
    zw: Array


def reflections(k: Array, w: Array, beta: Array) -> BlockReflections:
    """The matrices of one block: k and w (b, n, C, d), beta (b, n, C, 1)."""
    scaled = beta * w
    m = unit_lower_inverse(jnp.tril(product_with_transposed(scaled, w), k=-1))
    zr = product(m, jnp.tril(product_with_transposed(scaled, k), k=-1))
    zw = product(m, scaled)
    whole = identity_like(k) - transposed_product(w, zw)
    return BlockReflections(k - transposed_product(zr, w), whole, zr, zw)


def transport(q: Array, k: Array, w: Array, zr: Array, zw: Array) -> tuple[Array, Array]:
    """Q̃ and A_aa for the rows q (b, n, r C, d) of one block."""
    size = k.shape[-2]
    q_w = product_with_transposed(q, w)
    each = jnp.reshape(q_w, (*q_w.shape[:-2], -1, size, size))
    q_w = jnp.reshape(jnp.tril(each), q_w.shape)
    return q - product(q_w, zw), product_with_transposed(q, k) - product(q_w, zr)


class TransportedScores(DotScores):
    """Scores of PaTH, with directions w (b, n, s, d) and beta (b, n, s)."""

    def __init__(self, blocks: QueryBlocks, q: Array, k: Array, w: Array, beta: Array) -> None:
        super().__init__(blocks, q, k)
        self.w, self.beta = w, beta[..., None]
        self.all = lax.map(
            lambda j: reflections(*self._own(j)), jnp.arange(blocks.keys, dtype="int32")
        )

    def _own(self, j: Array) -> tuple[Array, Array, Array]:
        return tuple(self.blocks.take(x, j) for x in (self.k, self.w, self.beta))

    def _transport(self, a: Array) -> tuple[Array, ...]:
        """The arguments of `transport`."""
        k, w, _ = self._own(a)
        return self.blocks.row(self.q, a), k, w, _at(self.all.zr, a), _at(self.all.zw, a)

    def start(self, a: Array) -> Array:
        return transport(*self._transport(a))[0]

    def diagonal(self, a: Array) -> Array:
        return transport(*self._transport(a))[1]

    def tile(self, x: Array, j: Array) -> Array:
        return product_with_transposed(x, _at(self.all.keys, j))

    def carried(self, x: Array, j: Array) -> Array:
        """Queries carried from block j to block j − 1."""
        return product(x, _at(self.all.whole, j))

    def over(
        self, a: Array, first: Array, stop: Array, step: Step, state: Tree, loops: Loops = PLAIN
    ) -> Tree:
        def add(i: Array, carry: tuple[Tree, Array]) -> tuple[Tree, Array]:
            state, x = carry
            j = stop - 1 - i
            return step(state, self.tile(x, j), j), self.carried(x, j)

        start = (state, self.start(a))
        return loops.counted(self.blocks.keys, stop - first, add, start)[0]

    def sums(self) -> Sums:
        of_blocks = {name: zeros(x.shape, x) for name, x in self.all._asdict().items()}
        return of_blocks | {"k": zeros(self.k.shape, self.k), "w": zeros(self.k.shape, self.k)}

    def trail(self, a: Array, first: Array) -> Array:
        x = self.start(a)
        history = zeros((self.blocks.keys, *x.shape), x)

        def carry(i: Array, carried: tuple[Array, Array]) -> tuple[Array, Array]:
            x, history = carried
            j = a - 1 - i
            history = lax.dynamic_update_index_in_dim(history, x, j, 0)
            return self.carried(x, j), history

        return lax.fori_loop(0, a - first, carry, (x, history))[1]

    def on_trail(self, trail: Array, j: Array) -> Array:
        return _at(trail, j)

    def pulled(self, sums: Sums, trail: Array, y: Array, j: Array, d_tile: Array) -> Pulled:
        x = _at(trail, j)
        d_keys = _added(sums["keys"], j, transposed_product(d_tile, x))
        d_whole = _added(sums["whole"], j, transposed_product(x, y))
        y = product_with_transposed(y, _at(self.all.whole, j))
        y = product(d_tile, _at(self.all.keys, j)) + y
        return sums | {"keys": d_keys, "whole": d_whole}, y

    def pulled_diagonal(self, sums: Sums, a: Array, y: Array, d_diagonal: Array) -> Pulled:
        _, pull = jax.vjp(transport, *self._transport(a))
        d_q, d_k, d_w, d_zr, d_zw = pull((y, d_diagonal))
        return sums | {
            "k": self.blocks.add(sums["k"], a, d_k),
            "w": self.blocks.add(sums["w"], a, d_w),
            "zr": _added(sums["zr"], a, d_zr),
            "zw": _added(sums["zw"], a, d_zw),
        }, d_q

    def gradients(self, sums: Sums) -> Sums:
        def of_block(carry: Sums, j: Array) -> tuple[Sums, None]:
            _, pull = jax.vjp(reflections, *self._own(j))
            each = (_at(sums[name], j) for name in BlockReflections._fields)
            d_k, d_w, d_beta = pull(BlockReflections(*each))
            return {
                "k": self.blocks.add(carry["k"], j, d_k),
                "w": self.blocks.add(carry["w"], j, d_w),
                "beta": self.blocks.put(carry["beta"], j, d_beta),
            }, None

        carry = {"k": sums["k"], "w": sums["w"], "beta": zeros(self.beta.shape, self.beta)}
        result: Sums = lax.scan(of_block, carry, jnp.arange(self.blocks.keys, dtype="int32"))[0]
        return result | {"beta": result["beta"][..., 0]}


def scores_of(
    call: BlockedCall[SoftmaxAttention] | BlockedCall[LucidSolve], q: Array, k: Array
) -> DotScores:
    """Scores of the metric of a call's leaf."""
    if call.leaf.metric == DOT:
        return DotScores(call.blocks, q, k)
    return TransportedScores(call.blocks, q, k, call.of_keys("w"), call.of_keys("beta"))


def _at(stack: Array, j: Array) -> Array:
    return lax.dynamic_index_in_dim(stack, j, keepdims=False)


def _added(stack: Array, j: Array, x: Array) -> Array:
    return lax.dynamic_update_index_in_dim(stack, _at(stack, j) + x, j, 0)
