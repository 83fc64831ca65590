"""Faults of the chunked recurrences: between chunks, and in the decays within a chunk."""

from __future__ import annotations

from typing import Any

import numpy as np

from precondattn.arrays import namespace
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    STEP_BACKWARD,
    Fault,
)
from precondattn_conformance.faults.tokens import rolled
from precondattn_conformance.faults.written_by_hand.written import blocked
from precondattn_conformance.faults.written_by_hand.wrong import (
    changed_after,
    first_order,
    half_by_half,
)
from precondattn_portable import (
    channel_decay,
    chunkwise,
    chunkwise_additive,
    chunkwise_delta,
    chunkwise_delta_channels,
    head_decay,
)
from precondattn_portable.channel_decay import ChannelDecay
from precondattn_portable.chunkwise import Work
from precondattn_portable.chunkwise_additive import Additive
from precondattn_portable.chunkwise_delta import DeltaRule
from precondattn_portable.chunkwise_delta_channels import KeyDeltaRule
from precondattn_portable.head_decay import HeadDecay, sums_before, sums_from

BOTH = (FORWARD, BACKWARD)

RUN = (FORWARD, STEP)

PULL = (BACKWARD, STEP_BACKWARD)

ALL = (*RUN, *PULL)


def faults() -> list[Fault]:
    """All faults in this file."""
    return [
        *_of_states_between(),
        *_of_delta(),
        *_of_delta_by_channel(),
        *_of_undecayed(),
        *_of_head_decay(),
        *_of_channel_decay(),
    ]


def _of_states_between() -> list[Fault]:
    return [
        blocked(
            "linear",
            RUN,
            "a chunk reads the state before the preceding chunk",
            chunkwise_additive,
            "_from_states",
            lambda true: (
                lambda ops, decay, rows, states: true(ops, decay, rows, rolled(states, 1, axis=0))
            ),
        ),
        blocked(
            "linear",
            RUN,
            "the state not carried from a group of chunks to the next",
            chunkwise,
            "_read",
            lambda true: (
                lambda works, part, queries, lasts: (
                    true(works, part, queries, lasts)[0],
                    [0 * last for last in lasts],
                )
            ),
        ),
        blocked(
            "linear",
            PULL,
            "the gradient of the state after a group of chunks ignored",
            Additive,
            "d_states",
            lambda true: lambda self, q, d_o, d_state: true(self, q, d_o, 0 * d_state),
        ),
        blocked(
            "linear",
            BOTH,
            "fewer queries than keys placed at the first keys",
            Work,
            "of_reads",
            lambda _: lambda self, queries, part: self._chunks(queries, part, 0),
        ),
        blocked(
            "linear",
            STEP,
            "padding after the last token is written to the state",
            Work,
            "_chunks",
            _with_padding_of_ones,
        ),
        blocked(
            "ssd",
            RUN,
            "the state does not decay from chunk to chunk",
            chunkwise_additive,
            "add_kept_at",
            lambda true: (
                lambda ops, array, where, state, total: true(ops, array, where, state, None)
            ),
        ),
        blocked(
            "retention",
            PULL,
            "the gradient of the state does not decay from chunk to chunk",
            chunkwise_additive,
            "add_kept_at",
            lambda true: (
                lambda ops, array, where, state, total: true(ops, array, where, state, None)
            ),
        ),
        blocked(
            "conditioned_query[decay=head]",
            RUN,
            "the state before a chunk not read",
            chunkwise_additive,
            "_from_states",
            lambda true: lambda ops, decay, rows, states: true(ops, decay, rows, 0 * states),
        ),
    ]


def _with_padding_of_ones(true: Any) -> Any:
    def _chunks(self: Any, x: Any, part: range, missing: int) -> Any:
        chunks = true(self, x, part, missing)
        token = part.start * self.size + np.arange(len(part) * self.size)
        is_padding = (token >= self.s).reshape(len(part), 1, self.size, *(1,) * (chunks.ndim - 3))
        return namespace(chunks).where(is_padding, 1.0, chunks)

    return _chunks


def _of_delta() -> list[Fault]:
    return [
        blocked(
            "gated_delta",
            RUN,
            "the correction reads the state without decay",
            DeltaRule,
            "__init__",
            lambda true: changed_after(true, reading_k=lambda self: self.x.k * self.x.beta),
        ),
        blocked(
            "gated_delta",
            RUN,
            "a chunk's writes not decayed to its end",
            DeltaRule,
            "__init__",
            lambda true: changed_after(true, writing_k=lambda self: self.x.k),
        ),
        blocked(
            "delta",
            RUN,
            "the inverse within a chunk to first order",
            chunkwise_delta,
            "unit_lower_inverse",
            lambda _: first_order,
        ),
        blocked(
            "delta",
            ALL,
            "the inverse within a chunk half by half",
            chunkwise_delta,
            "unit_lower_inverse",
            half_by_half,
        ),
        blocked(
            "delta",
            PULL,
            "the state's gradient without that of the reads",
            chunkwise_delta,
            "pulled",
            lambda true: lambda ops, q, d_o, d_state: true(ops, q, 0 * d_o, d_state),
        ),
    ]


def _of_delta_by_channel() -> list[Fault]:
    return [
        blocked(
            "kda",
            RUN,
            "the correction reads the state without decay",
            KeyDeltaRule,
            "__init__",
            lambda true: changed_after(true, reading_k=lambda self: self.erase * self.x.beta),
        ),
        blocked(
            "kda",
            RUN,
            "a chunk's writes not decayed to its end",
            KeyDeltaRule,
            "__init__",
            lambda true: changed_after(true, writing_k=lambda self: self.x.k),
        ),
        blocked(
            "kda",
            (*RUN, *PULL),
            "the state does not decay from chunk to chunk",
            KeyDeltaRule,
            "_kept",
            lambda true: lambda self, chunk: 0 * true(self, chunk) + 1,
        ),
        blocked(
            "kda",
            RUN,
            "the inverse within a chunk to first order",
            chunkwise_delta_channels,
            "unit_lower_inverse",
            lambda _: first_order,
        ),
        blocked(
            "kda",
            PULL,
            "the gates' gradient without the reads of the state",
            chunkwise_delta_channels,
            "sums_from",
            lambda true: lambda x: 0 * true(x),
        ),
        blocked(
            "kda",
            PULL,
            "the gates' gradient without what is written to the state",
            chunkwise_delta_channels,
            "sums_before",
            lambda true: lambda x: 0 * true(x),
        ),
        blocked(
            "kda",
            PULL,
            "the gradient of β without the state that is erased",
            chunkwise_delta_channels,
            "row_sum",
            _without_state,
        ),
    ]


def _of_undecayed() -> list[Fault]:
    return [
        blocked(
            "comba",
            RUN,
            "within a chunk, the erase key reads the decayed state",
            chunkwise_delta,
            "previous_token",
            lambda _: lambda x: x,
        ),
        blocked(
            "comba",
            RUN,
            "the state before a chunk is read after the first decay",
            chunkwise_delta,
            "sums_before",
            lambda _: lambda x: namespace(x).cumulative_sum(x, axis=-2),
        ),
        blocked(
            "comba",
            PULL,
            "the gates' gradient as from reads of the decayed state",
            DeltaRule,
            "_at_gates",
            lambda _: lambda self, rows: rows,
        ),
    ]


def _without_state(true: Any) -> Any:
    """The second of the three sums of a gradient is 0."""
    calls = iter(range(1_000_000))
    return lambda x: true(x) * (next(calls) % 3 != 1)


def _of_head_decay() -> list[Fault]:
    return [
        blocked(
            "ssd",
            RUN,
            "a token's write decays by its own gate",
            head_decay,
            "sums_after",
            lambda _: sums_from,
        ),
        blocked(
            "gated_delta",
            RUN,
            "a token reads the state before the chunk without its own gate",
            HeadDecay,
            "__init__",
            lambda true: changed_after(true, reading=_reading_before),
        ),
        blocked(
            "ssd",
            PULL,
            "the kept state left out of the gates' gradient",
            HeadDecay,
            "d_g",
            lambda true: (
                lambda self, pairs, read, written, kept: true(self, pairs, read, written, 0 * kept)
            ),
        ),
        blocked(
            "ssd",
            PULL,
            "the reads of the state left out of the gates' gradient",
            HeadDecay,
            "d_g",
            lambda true: (
                lambda self, pairs, read, written, kept: true(self, pairs, 0 * read, written, kept)
            ),
        ),
    ]


def _reading_before(self: Any) -> Any:
    return self.reading if self.g is None else namespace(self.g).exp(sums_before(self.g))


def _of_channel_decay() -> list[Fault]:
    return [
        blocked(
            "gla",
            RUN,
            "the decays of a block's two halves swapped",
            ChannelDecay,
            "halvings",
            lambda true: property(
                lambda self: [h._replace(since=h.until, until=h.since) for h in true.func(self)]
            ),
        ),
        blocked(
            "gla",
            RUN,
            "a token's write decays by its own gate",
            channel_decay,
            "sums_after",
            lambda _: sums_from,
        ),
        blocked(
            "gla",
            PULL,
            "the pairs of a block left out of its second half's gates",
            channel_decay,
            "sums_from",
            lambda true: lambda x: 0 * true(x),
        ),
        blocked(
            "gsa",
            PULL,
            "the pairs of a block left out of its first half's gates",
            channel_decay,
            "sums_before",
            lambda true: lambda x: 0 * true(x),
        ),
        blocked(
            "gsa",
            RUN,
            "the slots' memory not read from the chunks before",
            chunkwise_additive.ValueAdditive,
            "_from_states",
            lambda true: lambda self, q, states: 0 * true(self, q, states),
        ),
    ]
