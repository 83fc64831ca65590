"""Outputs that JAX can differentiate any number of times, and steps of few tokens at a time.

Memory stays linear in the number of tokens. Blocked algorithms run in the loops of `loops.py`, and
a solve is differentiated as a solve (`lower_system.py`). Leaves whose definition is linear in
memory are computed by it, and so are packed calls of leaves that sum over whole sequences.

A step is split into steps of few new tokens, which bounds its memory to a few times the cache. Any
split of a sequence gives the same output.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from precondattn.algebra.leaf_protocol import LeafProtocol
from precondattn.arrays import Arrays, Residuals, Tree, cast, upcast_all
from precondattn.cache import Replace, Updates, append, updated
from precondattn.frame import Frame
from precondattn.frameworks.jax.derivative import with_derivative
from precondattn_jax.arithmetic import full_precision
from precondattn_jax.layout import is_known, padded
from precondattn_jax.loops import DIFFERENTIABLE, PLAIN, Loops
from precondattn_portable.algorithm import Algorithm

L = TypeVar("L", bound=LeafProtocol)

TOKENS = 64
"""New tokens per step."""

Step = Callable[[Arrays, Arrays, Frame], tuple[Array, Updates]]
"""A function (old buffers, new inputs, frame) that returns the output and the slots' updates."""


class AlgorithmInLoops(Algorithm[L]):
    """An algorithm that JAX can differentiate as soon as its loops are differentiable."""

    loops: Loops = PLAIN

    def output(self, x: Arrays, frame: Frame) -> Array:
        """The output, in operations that JAX can differentiate any number of times."""
        differentiable = copy(self)
        differentiable.loops = DIFFERENTIABLE
        return differentiable.forward(x, frame)[0]

    def output_as_defined(self, x: Arrays, frame: Frame) -> Array:
        return jax.checkpoint(lambda x: self.leaf.forward(x, frame)[0])(x)


class InFullPrecision(AlgorithmInLoops[L]):
    """An algorithm of `precondattn_portable`, which also multiplies without `JaxArithmetic`."""

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        with full_precision():
            return super().forward(x, frame)

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        with full_precision():
            return super().backward(x, frame, out, residuals, cotangent)


class SteppingAsDefined(AlgorithmInLoops[L]):
    """An algorithm whose step, or at least its derivative, is that of the leaf's definition."""

    def step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        return self.few_tokens_at_a_time(self.leaf.step, upcast_all(past), x, frame)

    def with_derivative_of_the_definition(self, step: Step) -> Step:
        """A step with the derivative of the definition's step, in forward and reverse mode."""

        def derivative(primals: Tree, tangents: Tree) -> tuple[Tree, Tree]:
            past, x, frame = primals

            @jax.checkpoint
            def defined(past: Arrays, x: Arrays) -> Tree:
                return self.leaf.step(upcast_all(past), x, frame)

            return differentiable(*primals), jax.jvp(defined, (past, x), tangents[:2])[1]

        differentiable = with_derivative(step, derivative)
        return differentiable

    def few_tokens_at_a_time(
        self, step: Step, past: Arrays, x: Arrays, frame: Frame
    ) -> tuple[Array, Updates]:
        """A step as several steps of few tokens."""
        t = frame.q_position.shape[1]
        if is_known(t) and t <= TOKENS:
            return step(past, x, frame)
        past = upcast_all(past)
        count = -(-t // TOKENS)
        capacity = frame.k_position.shape[1] - t
        assert frame.k_valid is not None  # It marks the empty slots of a cache.
        slot_valid, new_valid = frame.k_valid[:, :capacity], frame.k_valid[:, capacity:]
        slots, length = frame.k_position[:, :capacity], frame.q_position[:, 0]
        q_valid = jnp.ones_like(new_valid) if frame.q_valid is None else frame.q_valid
        axes = {name: self.leaf.inputs[name].time_axis for name in x}
        tokens = {n: _parts(x[n], axis, count) for n, axis in axes.items() if axis is not None}
        whole = {name: x[name] for name, axis in axes.items() if axis is None}

        def some_tokens(carry: Tree, xs: Tree) -> tuple[Tree, Array]:
            buffers, length, slot_valid = carry
            tokens, new_valid, q_valid, pairs = xs
            position = length[:, None] + jnp.arange(TOKENS, dtype=length.dtype)[None, :]
            k_position = jnp.concatenate([slots, position], axis=1)
            k_valid = jnp.concatenate([slot_valid, new_valid], axis=1)
            part = Frame(position, k_position, q_valid, k_valid, pairs=pairs)
            out, updates = step(buffers, tokens | whole, part)
            count_valid = jnp.sum(cast(q_valid, length.dtype), axis=1, dtype=length.dtype)
            buffers = {
                slot: updated(buffers[slot], update, length, count_valid, donate=False)
                for slot, update in updates.items()
            }
            slot_valid = append(slot_valid, new_valid, length, count_valid, donate=False)
            return (buffers, length + count_valid, slot_valid), out

        pairs = None if frame.pairs is None else _parts_of_pairs(frame.pairs, capacity, count)
        xs = (tokens, _parts(new_valid, 1, count), _parts(q_valid, 1, count), pairs)
        (buffers, _, _), outs = lax.scan(some_tokens, (past, length, slot_valid), xs)
        out = jnp.moveaxis(outs, 0, 1)
        out = jnp.reshape(out, (out.shape[0], count * TOKENS, *out.shape[3:]))[:, :t]
        return out, {slot: Replace(buffer) for slot, buffer in buffers.items()}


def _parts_of_pairs(pairs: Array, capacity: int, count: int) -> Array:
    """The rows of each part (count, b, h, TOKENS, c + TOKENS), for slots and the part's tokens."""
    rows = _parts(pairs, 2, count)
    new = padded(rows[..., capacity:], 0, count * TOKENS - (rows.shape[4] - capacity), 4)
    diagonal_tiles = [new[i, ..., i * TOKENS : (i + 1) * TOKENS] for i in range(count)]
    return jnp.concatenate([rows[..., :capacity], jnp.stack(diagonal_tiles)], axis=4)


def _parts(x: Array, axis: int, count: int) -> Array:
    """Tokens in parts (count, …), the last one padded with zeros."""
    shape = (*x.shape[:axis], count, TOKENS, *x.shape[axis + 1 :])
    whole = padded(x, 0, count * TOKENS - x.shape[axis], axis)
    return jnp.moveaxis(jnp.reshape(whole, shape), axis, 0)
