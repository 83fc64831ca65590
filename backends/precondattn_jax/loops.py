"""Loops over tiles, in two kinds: those of a plain call, and those that JAX can differentiate.

A plain loop ends at a number of steps that is known at run time. JAX has no reverse mode of it. A
differentiable loop has a fixed number of steps, skips those that are too many, and keeps nothing of
a step but what it begins with: the step is computed again when it is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from precondattn.arrays import Tree

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


PLAIN, DIFFERENTIABLE = Loops(), DifferentiableLoops()
