"""Loops over tiles, of two kinds: plain loops, and loops that JAX can differentiate.

The number of steps of a plain loop is known at run time only, so JAX has no reverse mode of it. A
differentiable loop has a fixed number of steps, and skips those that are too many. It stores the
inputs of each step only, and recomputes the step when it is differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from precondattn.arrays import Tree
from precondattn_portable.block_conjugate_gradients import Residual

Step = Callable[[Array, Any], Any]
"""A function of the number of a step and of a state, to the next state."""

again = partial(jax.checkpoint, prevent_cse=False)
"""A function whose intermediate results are recomputed for its derivative. `prevent_cse` is not
needed in a loop, where the compiler can not merge the second computation with the first."""


class Loops:
    """The loops of a plain call."""

    def counted(self, most: int, count: Array, step: Step, state: Tree) -> Tree:
        """The state after `count` steps, at most `most`."""
        return lax.fori_loop(0, count, step, state)

    def each(self, function: Callable[[Tree], Tree], xs: Tree) -> Tree:
        """The function of every row of xs, stacked."""
        return lax.map(function, xs)

    def scan(self, step: Callable[..., Tree], state: Tree, xs: Tree) -> Tree:
        """The last state, and the outputs of step(state, row) for every row of xs."""
        return lax.scan(step, state, xs)


class DifferentiableLoops(Loops):
    """Loops that JAX can differentiate any number of times, in any mode."""

    def counted(self, most: int, count: Array, step: Step, state: Tree) -> Tree:
        # The whole `cond` is recomputed, not the step within it: a `cond` returns the residuals
        # of its derivative, and would return copies of all inputs of the step.
        @again
        def next_state(state: Tree, i: Array) -> tuple[Tree, None]:
            return lax.cond(i < count, step, lambda _, state: state, i, state), None

        return lax.scan(next_state, state, jnp.arange(most, dtype="int32"))[0]

    def each(self, function: Callable[[Tree], Tree], xs: Tree) -> Tree:
        return lax.map(again(function), xs)

    def scan(self, step: Callable[..., Tree], state: Tree, xs: Tree) -> Tree:
        return lax.scan(again(step), state, xs)


PLAIN, DIFFERENTIABLE = Loops(), DifferentiableLoops()


def refined(
    right: Array,
    left: Residual,
    most: int,
    towards: Callable[[Array], Tree],
    advanced: Callable[[Tree], Tree],
    left_of: Callable[[Tree], Residual],
    residual: Callable[[Array], tuple[Array, Residual]],
) -> Array:
    """A⁻¹ right by an iteration that is restarted from the residual of its result.

    There are at most `most` steps search ← advanced(search). `left_of` is the residual according to
    the iteration's recurrence, and `left` the first one. NaN where the final residual is too large.
    """

    def is_open(carry: Tree) -> Array:
        search, used = carry
        return (used < most) & jnp.any(left_of(search).is_large())

    def is_left(carry: Tree) -> Array:
        _, _, left, used = carry
        return (used < most) & jnp.any(left.is_large())

    def with_search(carry: Tree) -> Tree:
        x, rest, _, used = carry
        search, used = lax.while_loop(
            is_open, lambda carry: (advanced(carry[0]), carry[1] + 1), (towards(rest), used)
        )
        x = x + search.x
        return x, *residual(x), used

    x, _, left, _ = lax.while_loop(is_left, with_search, (right * 0, right, left, 0))
    return jnp.where(left.is_small(), x, math.nan)
