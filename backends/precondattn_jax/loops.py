"""Loops over tiles, in two kinds: those of a plain call, and those that JAX can differentiate.

A plain loop ends at a number of steps that is known at run time. JAX has no reverse mode of it. A
differentiable loop has a fixed number of steps, skips those that are too many, and keeps nothing of
a step but what it begins with: the step is computed again when it is differentiated.
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
"""A function whose results within are not kept for its derivative, but computed again. In a loop
there is nothing that the compiler could join with it."""


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
        # The whole choice is computed again, not the step within it: a choice returns what its
        # derivative needs, and would return copies of all that such a step begins with.
        @again
        def next_state(state: Tree, i: Array) -> tuple[Tree, None]:
            return lax.cond(i < count, step, lambda _, state: state, i, state), None

        return lax.scan(next_state, state, jnp.arange(most))[0]

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
    """A⁻¹ right by an iteration, which is begun again for what is left of its result.

    There are at most `most` steps search ← advanced(search), of which `left_of` is what the
    iteration itself says is left; `left` is that at first. NaN where too much is left in the end.
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
