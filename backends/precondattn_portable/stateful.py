"""Leaves with a state: their own definition, with the recurrence in chunks, or of one token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from precondattn.arrays import Array, Arrays, Residuals
from precondattn.cache import Replace, Updates
from precondattn.frame import Frame
from precondattn.spec.recurrence import Form
from precondattn.spec.stateful import Stateful
from precondattn_portable.algorithm import Algorithm
from precondattn_portable.arithmetic import Arithmetic
from precondattn_portable.chunkwise import Chunkwise
from precondattn_portable.few_tokens import FewTokens, is_few
from precondattn_portable.one_token import OneToken

S = TypeVar("S", bound=Stateful, contravariant=True)


class StatefulAlgorithm(Algorithm[S]):
    """Algorithm of recurrences, such as GLA, SSD, GatedDelta, KDA, GSA (`chunkwise_*.py`).

    `in_chunks` builds them for an arithmetic. With `by_pairs`, full calls of few tokens are
    computed by pairs of tokens. A compiler has no use for that: what it saves is the time between
    operations.
    """

    name = "recurrence in chunks"

    def __init__(
        self, in_chunks: Callable[[Arithmetic], Form] = Chunkwise, *, by_pairs: bool = True
    ) -> None:
        self.in_chunks, self.by_pairs = in_chunks, by_pairs

    def _form(
        self, ops: Arithmetic, leaf: S, x: Mapping[str, Array], *, in_place: bool = False
    ) -> Form:
        if x["k" if "k" in x else "v"].shape[1] * leaf.steps_per_token == 1:
            return OneToken(ops, decays=leaf.has_decay, in_place=in_place)
        return self.in_chunks(ops)

    def forward(
        self, ops: Arithmetic, leaf: S, x: Mapping[str, Array], frame: Frame
    ) -> tuple[Array, Residuals]:
        if self.by_pairs and leaf.steps_per_token == 1 and is_few(x):
            decays = leaf.has_decay or frame.k_segment is not None
            pairs = cast("Form", FewTokens(ops, decays=decays))  # Its gradient is not asked for.
            unread = dict.fromkeys(leaf.program.slot_keys[0])
            state = leaf.zero_state(x) if leaf.computes_with_states else unread
            return leaf.run(state, x, frame, pairs)[0], ()
        return leaf.run(leaf.zero_state(x), x, frame, self._form(ops, leaf, x))[0], ()

    def backward(
        self,
        ops: Arithmetic,
        leaf: S,
        x: Mapping[str, Array],
        frame: Frame,
        out: Array,
        residuals: Residuals,
        cotangent: Array,
    ) -> Arrays:
        state, form = leaf.zero_state(x), self._form(ops, leaf, x)
        nothing = leaf.no_cotangents(state)
        gradients: Arrays = leaf.run_vjp(state, x, frame, cotangent, nothing, form)[0]
        return gradients

    def step(
        self,
        ops: Arithmetic,
        leaf: S,
        past: Mapping[str, Array],
        x: Mapping[str, Array],
        frame: Frame,
    ) -> tuple[Array, Updates]:
        form = self._form(ops, leaf, x, in_place=frame.may_overwrite)
        out, state = leaf.run(past, x, frame, form)
        return out, {name: Replace(value) for name, value in state.items()}

    def step_backward(
        self,
        ops: Arithmetic,
        leaf: S,
        past: Mapping[str, Array],
        x: Mapping[str, Array],
        frame: Frame,
        cotangent: Array,
        d_buffers: Mapping[str, Array],
    ) -> tuple[Arrays, Arrays]:
        form = self._form(ops, leaf, x)
        result: tuple[Arrays, Arrays] = leaf.run_vjp(past, x, frame, cotangent, d_buffers, form)
        return result
