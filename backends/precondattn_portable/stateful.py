"""Leaves with a state: their definition, with the recurrence computed in chunks or by one token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

from precondattn.arrays import Array, Arrays, Residuals, namespace
from precondattn.cache import Replace, Updates
from precondattn.frame import Frame
from precondattn.spec.array_functions import transpose
from precondattn.spec.recurrence import AllTokens, Form, Stream, erased, recurrent_vjp
from precondattn.spec.stateful import Stateful
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.chunkwise import Chunkwise
from precondattn_portable.few_tokens import FewTokens, is_few

S = TypeVar("S", bound=Stateful)


class OneToken(AllTokens):
    """A `Form` of the recurrence (`precondattn.spec.recurrence`) for streams of one token.

        S' = Γ ∘ S,    u = v  (additive),  β (v − S'ᵀ a)  (delta rule),
        S = S' + k uᵀ,    o = Sᵀ q

    with a the key that is erased. If a is given as `undecayed`, Sᵀ a replaces S'ᵀ a. With
    `in_place`, the new state is written to the old one's memory if the library supports it.
    """

    vjp = staticmethod(recurrent_vjp)

    def __init__(self, ops: Arithmetic, *, decays: bool, in_place: bool = False) -> None:
        self.ops, self.decays, self.in_place = ops, decays, in_place

    def forward(self, x: Stream, state: Array) -> tuple[Array, Array]:
        ops, in_place = self.ops, self.in_place
        if x.undecayed is not None:
            from_state = ops.product(x.undecayed, state)
        if self.decays:
            kept = namespace(state).exp(x.g[:, :, 0, ...])
            state = ops.multiply(state, kept) if in_place else state * kept
        u = x.v
        if x.beta is not None:
            if x.undecayed is None:
                from_state = ops.product(erased(x), state)
            u = x.beta[..., None] * (u - from_state)
        add = ops.add_multiple if in_place else ops.plus_product
        state = add(state, transpose(x.k), u)
        return ops.product(x.q[:, :, 0, ...], state)[:, :, None, ...], state


class StatefulAlgorithm(Algorithm[S]):
    """Algorithm of recurrences, such as GLA, SSD, GatedDelta, KDA, GSA (`chunkwise_*.py`).

    With `by_pairs`, full calls of few tokens are computed from all pairs of tokens. This saves the
    overhead between operations, which compiled calls do not have.
    """

    name = "recurrence in chunks"
    by_pairs = True

    def in_chunks(self) -> Form:
        return Chunkwise(self.ops)

    def _form(self, x: Arrays, *, in_place: bool = False) -> Form:
        if x["k" if "k" in x else "v"].shape[1] * self.leaf.steps_per_token == 1:
            return OneToken(self.ops, decays=self.leaf.has_decay, in_place=in_place)
        return self.in_chunks()

    def forward(self, x: Arrays, frame: Frame) -> tuple[Array, Residuals]:
        leaf = self.leaf
        if self.by_pairs and leaf.steps_per_token == 1 and is_few(x):
            decays = leaf.has_decay or frame.k_segment is not None
            # No gradient of this is needed.
            pairs = cast("Form", FewTokens(self.ops, decays=decays))
            unread = dict.fromkeys(leaf.program.slot_keys[0])
            state = leaf.zero_state(x) if leaf.computes_with_states else unread
            return leaf.run(state, x, frame, pairs)[0], ()
        return leaf.run(leaf.zero_state(x), x, frame, self._form(x))[0], ()

    def backward(
        self, x: Arrays, frame: Frame, out: Array, residuals: Residuals, cotangent: Array
    ) -> Arrays:
        state = self.leaf.zero_state(x)
        nothing = self.leaf.no_cotangents(state)
        return self.step_backward(state, x, frame, cotangent, nothing)[0]

    def step(self, past: Arrays, x: Arrays, frame: Frame) -> tuple[Array, Updates]:
        out, state = self.leaf.run(past, x, frame, self._form(x, in_place=frame.may_overwrite))
        return out, {name: Replace(value) for name, value in state.items()}

    def states_between(
        self, past: Arrays, x: Arrays, frame: Frame, columns: Sequence[int]
    ) -> tuple[Array, Arrays] | None:
        """The output of `step`, and the states (b, n + 1, …) after `columns` and after all tokens.

        None if these are not states between chunks.
        """
        leaf, form, steps = self.leaf, self.in_chunks(), self.leaf.steps_per_token
        if leaf.computes_with_states or type(form) is not Chunkwise:
            return None
        if not columns or any(not n or n * steps % form.chunk for n in columns):
            return None
        form = Chunkwise(self.ops, kept_after=[n * steps // form.chunk for n in columns])
        out, states = leaf.run(past, x, frame, form)
        rows = len(columns) + 1
        return out, {
            name: namespace(a).reshape(a, (-1, rows, *a.shape[1:])) for name, a in states.items()
        }

    def step_backward(
        self, past: Arrays, x: Arrays, frame: Frame, cotangent: Array, d_buffers: Arrays
    ) -> tuple[Arrays, Arrays]:
        return self.leaf.run_vjp(past, x, frame, cotangent, d_buffers, self._form(x))
