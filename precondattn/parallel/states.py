"""States of a recurrence whose tokens are divided: what each device must know of those before it.

The state after the tokens of a device is linear in the state before them,

    S_end = T S_begin + F,

with F the state from zeros, and T the transition: nothing for a sum without decay, a number for
each row for a decay, and a d × d matrix for the delta rule. Two neighbours together have

    T = T₂ T₁,    F = T₂ F₁ + F₂,

which is associative: a prefix scan along the devices gives each one its S_begin. Backward, with g
the gradient of S_begin from the device's own outputs, the gradient of S_end is that of the next
device's S_begin, λ = Tᵀ λ_next + g, which is the same scan from the last device on.

F and T are one call of the mechanism: on values with more columns, which are 0, from a state with 0
in the columns of F and, in those of T, 1 or the identity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from precondattn.arrays import Array, namespace
from precondattn.spec.array_functions import identity_like, transpose
from precondattn.spec.linear import Linear
from precondattn.spec.linear_family import LinearFamily

if TYPE_CHECKING:
    from precondattn.algebra.mechanism import Leaf


def refusal(leaf: Leaf) -> str | None:
    """Why the states of a leaf of the linear family have no scan; None where they have."""
    if isinstance(leaf, Linear) and leaf.normalize:
        return "scans one state, and normalize=true has another, of weights; use the layout 'heads'"
    return None


class Step(NamedTuple):
    """S_end = T S_begin + F, of some consecutive tokens."""

    transition: Array | None
    """T (b, m, d, 1) or (b, m, d, d); None for 1."""
    state: Array
    """F (b, m, d, e)"""

    def after(self, earlier: Step) -> Step:
        """Both, the earlier tokens first."""
        return Step(times(self.transition, earlier.transition), self.on(earlier.state))

    def on(self, state: Array) -> Array:
        """S_end of a state S_begin."""
        return self.state + times(self.transition, state)

    def adjoint(self, gradient: Array) -> Step:
        """λ ↦ Tᵀ λ + g, g the gradient of S_begin from the outputs."""
        is_matrix = self.transition is not None and self.transition.shape[-1] > 1
        return Step(transpose(self.transition) if is_matrix else self.transition, gradient)


def times(transition: Array | None, x: Any) -> Any:
    """T x; None is 1."""
    if transition is None or x is None:
        return x if transition is None else transition
    return transition * x if transition.shape[-1] == 1 else transition @ x


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
