"""The states of recurrences whose tokens are divided among devices, by a prefix scan.

The state after the tokens of a device is linear in the state before them,

    S_end = T S_begin + F,

where F is the state computed from zeros, and T the transition: the identity for a sum without
decay, a number for each row for a decay, and a d × d matrix for the delta rule. Two neighbouring
devices together have

    T = T₂ T₁,    F = T₂ F₁ + F₂,

which is associative, so a prefix scan along the devices gives each one its S_begin. In the backward
pass let g be the gradient of S_begin from the device's own outputs, and λ the whole gradient of
S_begin. The gradient of S_end is λ_next, the λ of the next device, and λ = Tᵀ λ_next + g. This is
the same scan, from the last device to the first.

One call of the leaf computes F and T: its values have additional columns of 0 for T, and its
initial state is 0 in the columns of F, and 1 or the identity in the columns of T.

The states of other leaves are sums in which each entry has its own factor: CCQ's moments, Mesa's H,
the slots of GSA, the squares of ATK. For them F is the result of a call from zeros, and T is the
gradient of the sum of S_end with respect to S_begin.

A state is reset at the first token of a segment of a packed sequence. If a segment begins among a
device's tokens, its T is therefore 0, and F is the state of the last segment's tokens. If a segment
begins at a device's first token, its S_begin is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from precondattn.algebra.call import Call
from precondattn.algebra.mechanism import Leaf
from precondattn.algebra.piece import BackendNames
from precondattn.arrays import Array, Device, Tree, arange_like, cast, namespace, zero_where_not
from precondattn.cache import Cache
from precondattn.execution import run
from precondattn.parallel.layouts import TokenOrder
from precondattn.spec.array_functions import identity_like, transpose
from precondattn.spec.conditioned_query import ConditionedQuery
from precondattn.spec.gsa import GSA
from precondattn.spec.linear import Linear
from precondattn.spec.linear_family import LinearFamily
from precondattn.spec.mesa_query import MesaQuery
from precondattn.spec.preconditioned_key import PreconditionedKey

SUMS = (ConditionedQuery, MesaQuery, GSA, PreconditionedKey)
"""Leaves whose states are sums, besides the leaves of the linear family"""


def is_scaled(leaf: Leaf) -> bool:
    """Whether each entry of a leaf's states has its own factor: sums with or without a decay."""
    if isinstance(leaf, LinearFamily):
        return isinstance(leaf, Linear) and leaf.normalize
    return isinstance(leaf, SUMS)


def refusal(leaf: Leaf, order: TokenOrder) -> str | None:
    """The reason why a leaf's states can not be scanned; None if they can."""
    if order.name != "contiguous":
        return f"gives a device tokens that are not consecutive, as {leaf} needs them"
    if leaf.recurrence is not None and leaf.recurrence.normaliser == "running maximum":
        return f"has no scan of the states of {leaf}, which are relative to a running maximum"
    return None


class StateMap(NamedTuple):
    """The map S_end = T S_begin + F of consecutive tokens."""

    transition: Array | None
    """T (b, m, d, 1) or (b, m, d, d), or a factor for each entry of the state; None for 1."""
    state: Array
    """F, in the shape of the state"""
    is_scaled: bool = False
    """Whether T has a factor for each entry of the state"""
    is_open: Array | None = None
    """Whether all tokens continue the segment of the token before them (b,); if not, T is 0"""

    def after(self, earlier: StateMap) -> StateMap:
        """The map of the earlier tokens followed by these."""
        both = None if earlier.transition is None else self.times(earlier.transition)
        is_open = None if self.is_open is None else self.is_open & earlier.is_open
        return StateMap(both, self.end_of(earlier.state), self.is_scaled, is_open)

    def end_of(self, state: Array) -> Array:
        """S_end for a state S_begin."""
        return self.state + self.times(state)

    def times(self, x: Array) -> Array:
        """T x."""
        if self.transition is not None:
            is_product = not self.is_scaled and self.transition.shape[-1] > 1
            x = self.transition @ x if is_product else self.transition * x
        return kept(x, self.is_open)

    def adjoint(self, gradient: Array) -> StateMap:
        """The map λ ↦ Tᵀ λ + g, where g is the gradient of S_begin from the outputs."""
        if self.is_scaled or self.transition is None or self.transition.shape[-1] == 1:
            return self._replace(state=gradient)
        return StateMap(transpose(self.transition), gradient, is_open=self.is_open)


class SegmentBorders(NamedTuple):
    """Whether segments cross the borders between devices; both arrays are (devices, b)."""

    continues: Array
    """Whether a device's first token continues the segment of the token before it"""
    is_open: Array
    """Whether all of a device's tokens do"""

    @classmethod
    def of_segments(cls, segments: Sequence[Array]) -> SegmentBorders:
        """The borders, from the contiguous segments (b, tokens) of every device."""
        xp = namespace(segments[0])
        firsts, lasts = ([ids[:, at] for ids in segments] for at in (0, -1))
        before = xp.stack([firsts[0], *lasts[:-1]])
        return cls(xp.stack(firsts) == before, xp.stack(lasts) == before)

    def is_open_before(self, device: Device, distance: int, *, is_reversed: bool) -> Array:
        """`StateMap.is_open` (b,) of what a device receives in a round of the scan.

        It receives the map of `distance` devices, the last of which is `distance` before it. In
        reverse they are after it, and the first is `distance` after it.
        """
        if is_reversed:
            start, end = device + distance, device + 2 * distance - 1
        else:
            start, end = device - 2 * distance + 1, device - distance
        each = arange_like(self.is_open.shape[0], self.is_open)[:, None]
        return namespace(each).all(self.is_open | (each < start) | (each > end), axis=0)


def states_before(
    devices: int,
    steps: Sequence[StateMap],
    passed: Callable[[Tree, int], Tree],
    borders: SegmentBorders | None,
    device: Device,
    *,
    is_reversed: bool,
) -> list[Array] | None:
    """S_begin of this device, for each of its states, in log₂ P rounds.

    In round i a device sends T and F of the last 2^i devices up to itself to the device that is 2^i
    places later: Hillis and Steele 1986, Data parallel algorithms. In the last round no T is read.
    With packed sequences the result is S_end of the device before, whose last segment may end
    there.

    `passed(arrays, distance)` gives the arrays of the device `distance` places before this one, or
    None if there is none; where one program runs on all devices, 0 in place of None. `is_reversed`:
    devices after this one take the place of those before it.
    """
    distance = 1
    while distance < devices:
        is_last = 2 * distance >= devices
        sent = [(None if is_last else step.transition, step.state) for step in steps]
        received = passed(sent, distance)
        if received is not None:
            is_open = None
            if borders is not None:
                is_open = borders.is_open_before(device, distance, is_reversed=is_reversed)
            steps = [
                step.after(StateMap(transition, state, step.is_scaled, is_open))
                for step, (transition, state) in zip(steps, received, strict=True)
            ]
        distance *= 2
    received = passed([(None, step.state) for step in steps], 1)
    return None if received is None else [state for _, state in received]


def kept(x: Array, mask: Array | None) -> Array:
    """A state, set to 0 in sequences where the mask (b,) is False; unchanged without a mask."""
    if mask is None:
        return x
    return zero_where_not(namespace(mask).reshape(mask, (-1, *(1,) * (x.ndim - 1))), x)


def extended(
    verb: str,
    leaf: Leaf,
    cache: Cache,
    inputs: Mapping[str, Array],
    backend: BackendNames,
    masks: Mapping[str, Array],
) -> Tree:
    """`leaf.extend` or `leaf.extend_vjp`, with `segment_ids` among the masks if tokens are packed.

    The states in the cache belong to the segment of the first token.
    """
    masks = {"lengths": None, "key_mask": None, **masks}
    return getattr(run, verb)(Call(verb, leaf, (), dict(inputs), masks, backend, cache))


def columns_of_transition(leaf: Leaf, d: int) -> int:
    """The number of additional columns of the state in which T is computed: 0, 1 or d."""
    assert isinstance(leaf, LinearFamily)  # `refusal` has checked it.
    if not leaf.declares.is_diagonal:
        return d
    return 1 if leaf.has_decay else 0


def steps_of_tokens(
    leaf: Leaf, inputs: Mapping[str, Array], backend: BackendNames, masks: Mapping[str, Array]
) -> dict[str, StateMap]:
    """T and F of some tokens for each state, by the state's name in a cache."""
    cache = leaf.init_cache(**inputs)
    if not is_scaled(leaf):
        (key,) = cache.store
        return {key: step_of_tokens(leaf, inputs, backend, masks)}
    out, cache, pull = extended("extend_vjp", leaf, cache, inputs, backend, masks)
    xp = namespace(out)
    ones = {key: xp.ones_like(state) for key, state in cache.store.items()}
    _, factors = pull(xp.zeros_like(out), ones)
    return {key: StateMap(factors[key], state, True) for key, state in cache.store.items()}


def step_of_tokens(
    leaf: Leaf, inputs: Mapping[str, Array], backend: BackendNames, masks: Mapping[str, Array]
) -> StateMap:
    """T and F of some tokens, for a leaf with one state."""
    e = inputs["v"].shape[-1]
    columns = columns_of_transition(leaf, inputs["q"].shape[-1])
    of_values = {name for name, pattern in leaf.inputs.items() if pattern.letters[-1] == "e"}
    wide = {n: _widened(x, columns) if n in of_values else x for n, x in inputs.items()}
    cache = leaf.init_cache(**wide)
    ((key, state),) = cache.store.items()
    if columns:  # 0, and 1 or the identity in the columns from e on.
        xp, zero = namespace(state), 0 * state[..., e:]
        one = xp.ones_like(state[..., :1]) if columns == 1 else identity_like(zero)
        state = xp.concat([state[..., :e], one + zero], axis=-1)
    cache = with_states(cache, {key: state})
    _, cache = extended("extend", leaf, cache, wide, backend, masks)
    (state,) = cache.store.values()
    return StateMap(state[..., e:] if columns else None, state[..., :e])


def _widened(x: Array, columns: int) -> Array:
    """x with additional columns of 0."""
    xp = namespace(x)
    zero = xp.zeros_like(x[..., :1])
    return xp.concat([x, xp.broadcast_to(zero, (*x.shape[:-1], columns))], axis=-1)


def with_states(cache: Cache, states: Mapping[str, Array]) -> Cache:
    """A cache in which these states replace the old ones."""
    return cache._replace(
        store={key: cast(state, cache.store[key].dtype) for key, state in states.items()}
    )
