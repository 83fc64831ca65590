"""LUCID's triangular solve with tokens divided among the devices of JAX.

The equations and the order are those of `torch/solve.py`. Blocks are solved one after another, each
by the device that has it, and broadcast; every device subtracts Φ y from its later rows. The
backward pass goes through the blocks in reverse. Here this is a loop over the blocks of the
sequence. Inside it, each device loops over its later blocks (its earlier ones in the backward
pass), whose number differs between devices.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from precondattn.arrays import Tree, upcast
from precondattn.given import Arguments
from precondattn.parallel.jax.solve_blocks import SolveBlocks
from precondattn.parallel.masks import DividedMasks, crossing
from precondattn.parallel.solve import BLOCK, keys_of_scores, product, product_vjp
from precondattn.parallel.ways import DividedPiece
from precondattn.spec.rms_norm import rms_norm_vjp


def output(piece: DividedPiece) -> Array:
    """The solved values y of a device's tokens."""
    x, leaf = piece.inputs, piece.leaf
    blocks = SolveBlocks(leaf, piece.call.line, piece.call.backend, x["k"].shape[1], BLOCK)
    return _solved(blocks, piece.masks, x["k"], x["v"], x.get("lucid_beta"))


class _Stacks:
    """The stacks of a device's blocks, and which of their rows see a broadcast block."""

    def __init__(
        self, blocks: SolveBlocks, masks: DividedMasks, k: Array, beta: Array | None
    ) -> None:
        self.blocks, self.masks = blocks, masks
        self.k = blocks.stacked(k)
        self.unit = keys_of_scores(blocks.leaf, self.k)
        self.beta = None if beta is None else blocks.stacked(upcast(beta))
        self.valid = blocks.valid(masks, k.shape[0])
        self.segment = blocks.segment(masks, blocks.line.rank)

    def arguments(self, u: Array, i: Array) -> Arguments:
        """The arguments of the solve of block i, with the right-hand sides u."""
        arguments = self.blocks.of_block({"k": self.k, "v": u, "lucid_beta": self.beta}, i)
        masks = {"key_mask": self.valid, "segment_ids": self.segment}
        return arguments | {name: mask[i] for name, mask in masks.items() if mask is not None}

    def visible(self, number: Array, i: Array, *, is_later: bool) -> tuple[Array | None, Arguments]:
        """The mask of attention between a block and the device's block i before or after it.

        The later one has the queries. The results are which queries (b, rows) see any key, None if
        all do, and the options of the attention.
        """
        options = {"backend": self.blocks.backend}
        if self.segment is None:
            return None, options
        device, place = self.blocks.place(number)
        of_block = self.blocks.segment(self.masks, device)
        assert of_block is not None  # All devices have segments.
        both = crossing(of_block[place], self.segment[i], -1 if is_later else 0)
        keys, queries = both if is_later else both[::-1]
        return queries, options | {"key_mask": keys}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _solved(
    blocks: SolveBlocks, masks: DividedMasks, k: Array, v: Array, beta: Array | None
) -> Array:
    return _forward(blocks, masks, k, v, beta)[0]


def _forward(
    blocks: SolveBlocks, masks: DividedMasks, k: Array, v: Array, beta: Array | None
) -> tuple[Array, Tree]:
    """The solved values of a device's rows, and the residuals of the backward pass."""
    stacks = _Stacks(blocks, masks, k, beta)

    def subtracted(number: Array, received: Tree, u: Array, start: Array, stop: int) -> Array:
        """u minus Φ y of a broadcast block, for the device's blocks `start` … `stop` − 1."""
        keys, values = received
        keys = keys_of_scores(blocks.leaf, keys)

        def from_block(i: Array, u: Array) -> Array:
            seen_by, options = stacks.visible(number, i, is_later=True)
            tokens = stacks.unit[i], keys, values
            return u.at[i].add(-product(blocks.leaf, *tokens, seen_by, **options))

        return lax.fori_loop(start, stop, from_block, u)

    def step(number: Array, state: Tree) -> Tree:
        u, y = state
        i = blocks.place(number)[1]
        solved = blocks.where_own(number, lambda: upcast(blocks.leaf(**stacks.arguments(u, i))))
        y = y.at[i].set(jnp.where(blocks.is_own(number), solved, y[i]))
        received, start = blocks.broadcast(number, (stacks.k, y)), blocks.earlier(number + 1)
        return subtracted(number, received, u, start, blocks.of_device), y

    u = blocks.stacked(upcast(v))
    u, y = lax.fori_loop(0, blocks.all, step, (u, jnp.zeros_like(u)))
    return blocks.unstacked(y).astype(v.dtype), (masks, k, v, beta, u, y)


def _backward(blocks: SolveBlocks, saved: Tree, d_y: Array) -> Tree:
    masks, k, v, beta, u, y = saved
    stacks = _Stacks(blocks, masks, k, beta)

    def subtracted(number: Array, received: Tree, sums: Tree, start: Array, stop: Array) -> Tree:
        """r minus Φᵀ g of a broadcast block, and the key gradients, in earlier blocks."""
        keys, of_block = received
        keys = keys_of_scores(blocks.leaf, keys)

        def from_block(i: Array, sums: Tree) -> Tree:
            r, d_unit, d_keys = sums
            seen_by, options = stacks.visible(number, i, is_later=False)
            tokens = keys, stacks.unit[i], y[i]
            gradients = product_vjp(blocks.leaf, *tokens, -of_block, seen_by, **options)
            r, d_unit = r.at[i].add(gradients["v"]), d_unit.at[i].add(gradients["k"])
            return r, d_unit, d_keys + gradients["q"]

        return lax.fori_loop(start, stop, from_block, sums)

    def step(done: Array, state: Tree) -> Tree:
        r, d_unit, solved = state
        number = blocks.all - 1 - done
        i, is_own = blocks.place(number)[1], blocks.is_own(number)

        def gradients() -> Tree:
            _, pull = blocks.leaf.vjp(**stacks.arguments(u, i))
            pulled = pull(r[i])
            return {name: upcast(pulled[name]) for name in solved}

        of_block = blocks.where_own(number, gradients)
        solved = {
            name: stack.at[i].set(jnp.where(is_own, of_block[name], stack[i]))
            for name, stack in solved.items()
        }
        received, stop = blocks.broadcast(number, (stacks.k, solved["v"])), blocks.earlier(number)
        sums = (r, d_unit, jnp.zeros_like(d_unit[0]))
        r, d_unit, d_keys = subtracted(number, received, sums, jnp.zeros_like(stop), stop)
        d_keys = jnp.where(is_own, lax.psum(d_keys, blocks.line.axis), 0)
        return r, d_unit.at[i].add(d_keys), solved

    zeros = {"k": jnp.zeros_like(stacks.unit), "v": jnp.zeros_like(u)}
    if stacks.beta is not None:
        zeros["lucid_beta"] = jnp.zeros_like(stacks.beta)
    state = (blocks.stacked(upcast(d_y)), jnp.zeros_like(stacks.unit), zeros)
    _, d_unit, d_own = lax.fori_loop(0, blocks.all, step, state)
    d_unit, d_k = blocks.unstacked(d_unit), blocks.unstacked(d_own["k"])
    if blocks.leaf.normalize == "keys":
        d_unit = rms_norm_vjp(upcast(k), blocks.leaf.eps, d_unit)
    d_beta = None if beta is None else blocks.unstacked(d_own["lucid_beta"]).astype(beta.dtype)
    d_v = blocks.unstacked(d_own["v"])
    return None, (d_k + d_unit).astype(k.dtype), d_v.astype(v.dtype), d_beta


_solved.defvjp(_forward, _backward)
