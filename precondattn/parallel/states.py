"""States of a recurrence whose tokens are divided: what each device must know of those before it.

The state after the tokens of a device is linear in the state before them,

    S_end = T S_begin + F,

with F the state from zeros, and T the transition: nothing for a sum without decay, a number for
each row for a decay, and a d × d matrix for the delta rule. Two neighbours together have

    T = T₂ T₁,    F = T₂ F₁ + F₂,

which is associative: a prefix scan along the devices gives each one its S_begin. Backward, with g
the gradient of S_begin from the device's own outputs, the gradient of S_end is that of the next
device's S_begin, λ = Tᵀ λ_next + g, which is the same scan from the last device on.

F and T are one call of the leaf: on values with more columns, which are 0, from a state with 0 in
the columns of F and, in those of T, 1 or the identity.

The states of other leaves are sums, and each of their numbers has a factor of its own: CCQ's
moments, Mesa's H, the slots of GSA, the squares of ATK. Their F is a call from zeros, and T the
gradient of the sum of S_end in S_begin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import identity_like, transpose
from precondattn.spec.conditioned_query import ConditionedQuery
from precondattn.spec.gsa import GSA
from precondattn.spec.linear import Linear
from precondattn.spec.linear_family import LinearFamily
from precondattn.spec.mesa_query import MesaQuery
from precondattn.spec.preconditioned_key import PreconditionedKey

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Leaf


SUMS = (ConditionedQuery, MesaQuery, GSA, PreconditionedKey)
"""Leaves whose states are sums, besides those of the linear family"""


def is_scaled(leaf: Leaf) -> bool:
    """Whether every number of its states has a factor of its own: sums that decay or do not."""
    if isinstance(leaf, LinearFamily):
        return isinstance(leaf, Linear) and leaf.normalize
    return isinstance(leaf, SUMS)


class Step(NamedTuple):
    """S_end = T S_begin + F, of some consecutive tokens."""

    transition: Array | None
    """T (b, m, d, 1) or (b, m, d, d), or a factor of each number of the state; None for 1."""
    state: Array
    """F, as (b, m, d, e)"""
    is_scaled: bool = False
    """Whether T is a factor of each number"""

    def after(self, earlier: Step) -> Step:
        """Both, the earlier tokens first."""
        both = None if earlier.transition is None else self.times(earlier.transition)
        return Step(both, self.on(earlier.state), self.is_scaled)

    def on(self, state: Array) -> Array:
        """S_end of a state S_begin."""
        return self.state + self.times(state)

    def times(self, x: Array) -> Array:
        """T x."""
        if self.transition is None:
            return x
        is_product = not self.is_scaled and self.transition.shape[-1] > 1
        return self.transition @ x if is_product else self.transition * x

    def adjoint(self, gradient: Array) -> Step:
        """λ ↦ Tᵀ λ + g, g the gradient of S_begin from the outputs."""
        if self.is_scaled or self.transition is None or self.transition.shape[-1] == 1:
            return self._replace(state=gradient)
        return Step(transpose(self.transition), gradient)


def columns_of_transition(leaf: Leaf, d: int) -> int:
    """How many columns of the state T is computed in: 0, 1 or d."""
    assert isinstance(leaf, LinearFamily)  # Others have no scan.
    if leaf.is_delta:
        return d
    return 1 if leaf.has_decay else 0


def with_transition(state: Array, e: int) -> Array:
    """A state of zeros (b, m, d, e + columns), with 1 or the identity in the columns from e on."""
    xp, columns = namespace(state), state.shape[-1] - e
    if not columns:
        return state
    one = xp.ones_like(state[..., :1]) if columns == 1 else identity_like(state[..., e:])
    return xp.concat([state[..., :e], one + 0 * state[..., e:]], axis=-1)


def step_of(state: Array, e: int) -> Step:
    """From the state after the call that computes both."""
    transition = state[..., e:]
    return Step(transition if transition.shape[-1] else None, state[..., :e])
