"""The base class of leaves with a state: one function serves full calls and `extend`.

A full call runs from a zero state and discards the final state; `extend` runs from the cache's
state and returns the new one. A subclass therefore defines only `run` and `run_vjp`. The form of
the recurrence is passed in, so that a backend can supply a faster one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property, lru_cache

from precondattn.algebra import Flops, Leaf, Pattern, Recurrence
from precondattn.algebra.flops import state_flops, state_heads
from precondattn.algebra.leaf_protocol import missing_method
from precondattn.arrays import Array, Arrays, ByName, Residuals, Shape, namespace
from precondattn.cache import Replace, Slot, Updates, new_buffer
from precondattn.frame import Frame
from precondattn.limits import KEPT_PLANS
from precondattn.spec.recurrence import RECURRENT, Form


class Stateful(Leaf):
    """A leaf whose slots are a state, of a size that does not depend on the number of tokens."""

    def refuses_mask(self, name: str) -> str | None:
        return f"{self.name} sums up all tokens before a query in a state, without single pairs"

    @cached_property
    def has_decay(self) -> bool:
        """Whether its states decay."""
        return "g" in self.inputs or self.offers.decay is not None

    @property
    def declares(self) -> Recurrence | None:
        """The recurrence that its class says it is, or None."""
        return None

    @cached_property
    def recurrence(self) -> Recurrence | None:
        return None if defines_its_own(type(self)) else self.declares

    @property
    def steps_per_token(self) -> int:
        """How many steps of the recurrence a token makes."""
        return 1 if self.declares is None else self.declares.steps or 1

    @property
    def computes_with_states(self) -> bool:
        """Whether `run` does more with states than pass them to a form, and return them."""
        return False

    def run(self, state: ByName, x: ByName, frame: Frame, form: Form) -> tuple[Array, Arrays]:
        """The output, and the new state by slot."""
        raise missing_method(self, "run", "every call needs")

    def run_vjp(
        self, state: ByName, x: ByName, frame: Frame, cotangent: Array, d_state: ByName, form: Form
    ) -> tuple[Arrays, Arrays]:
        """The gradients of the inputs and of the state, from those of output and new state."""
        raise missing_method(self, "run_vjp", "gradients need")

    def flops(self, sizes: Mapping[str, int]) -> Flops | None:
        """Each matrix of the state is written to and read from once per token, in chunks."""
        states = (Pattern.read(slot.pattern).axes for slot in self.slots())
        matrices = [axes[2:] for axes in states if len(axes) == 4]
        if not matrices:
            return None
        tokens = sizes["s"] if "s" in sizes else sizes["t"]
        per_head = [state_flops(tokens, *(axis.size(sizes) for axis in axes)) for axes in matrices]
        return Flops(*map(sum, zip(*per_head, strict=True))).times(state_heads(sizes))

    def zero_state(self, x: ByName) -> Arrays:
        """The state before the first token."""
        shapes = tuple([tuple(array.shape) for array in x.values()])
        is_known = all(type(size) is int for shape in shapes for size in shape)
        # Symbolic sizes have no hash.
        slots = (_state_shapes if is_known else _state_shapes.__wrapped__)(self, tuple(x), shapes)
        like = next(iter(x.values()))
        return {slot.name: new_buffer(slot, shape, like) for slot, shape in slots}

    def no_cotangents(self, state: ByName) -> Arrays:
        """Cotangents of 0, of a state."""
        return {name: namespace(array).zeros_like(array) for name, array in state.items()}

    def forward(self, x: ByName, frame: Frame) -> tuple[Array, Residuals]:
        return self.run(self.zero_state(x), x, frame, RECURRENT)[0], ()

    def backward(
        self, x: ByName, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        state = self.zero_state(x)
        d_state = self.no_cotangents(state)
        return self.run_vjp(state, x, frame, cotangent, d_state, RECURRENT)[0]

    def step(self, past: ByName, x: ByName, frame: Frame) -> tuple[Array, Updates]:
        out, state = self.run(past, x, frame, RECURRENT)
        return out, {name: Replace(value) for name, value in state.items()}

    def step_backward(
        self, past: ByName, x: ByName, frame: Frame, cotangent: Array, d_buffers: ByName
    ) -> tuple[Arrays, Arrays]:
        return self.run_vjp(past, x, frame, cotangent, d_buffers, RECURRENT)


DESCRIBED = frozenset(
    ("name", "role", "variants", "is_base", "offers", "meaning", "flops", "check_together")
)
"""What a class may say of itself without other mathematics."""


def defines_its_own(leaf: type[Stateful]) -> bool:
    """Whether a class defines mathematics below the class that declares the recurrence."""
    fields = {field.name for field in dataclasses.fields(leaf)}
    for each in leaf.__mro__:
        if "declares" in vars(each):
            return False
        defined = {name for name in vars(each) if not name.startswith("__")}
        if defined - fields - DESCRIBED:
            return True
    return False


@lru_cache(maxsize=KEPT_PLANS)
def _state_shapes(
    leaf: Stateful, names: tuple[str, ...], shapes: tuple[Shape, ...]
) -> tuple[tuple[Slot, Shape], ...]:
    """The slots of a leaf and their shapes, for inputs of these names and shapes."""
    sizes = leaf.inputs.sizes(str(leaf), dict(zip(names, shapes, strict=True)))
    return tuple((slot, Pattern.read(slot.pattern).shape(sizes)) for slot in leaf.slots())
