"""Faults of the chunked recurrences: between chunks, and in the decays within a chunk."""

from __future__ import annotations

import numpy as np

from precondattn.arrays import Array, namespace
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    STEP_BACKWARD,
    Fault,
    Function,
)
from precondattn_conformance.faults.tokens import rolled
from precondattn_conformance.faults.written_by_hand.written import blocked
from precondattn_portable import chunkwise
from precondattn_portable.chunkwise import ChunkWork
from precondattn_portable.chunkwise_additive import Additive
from precondattn_portable.head_decay import ChunkDecay

BOTH = (FORWARD, BACKWARD)

RUN = (FORWARD, STEP)

PULL = (BACKWARD, STEP_BACKWARD)

ALL = (*RUN, *PULL)


def faults() -> list[Fault]:
    """All faults in this file."""
    return [
        blocked(
            "linear",
            RUN,
            "a chunk reads the state before the preceding chunk",
            ChunkDecay,
            "of_states",
            lambda true: lambda self, q, states: true(self, q, rolled(states, 1, axis=0)),
        ),
        blocked(
            "linear",
            RUN,
            "the state not carried from a group of chunks to the next",
            chunkwise,
            "_read",
            lambda true: (
                lambda works, part, queries, lasts, *kept: (
                    true(works, part, queries, lasts, *kept)[0],
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
            ChunkWork,
            "of_reads",
            lambda _: lambda self, queries, part: self._chunks(queries, part, 0),
        ),
        blocked(
            "linear",
            STEP,
            "padding after the last token is written to the state",
            ChunkWork,
            "_chunks",
            _with_padding_of_ones,
        ),
    ]


def _with_padding_of_ones(true: Function) -> Function:
    def _chunks(self: ChunkWork, x: Array, part: range, missing: int) -> Array:
        chunks = true(self, x, part, missing)
        token = part.start * self.size + np.arange(len(part) * self.size)
        is_padding = (token >= self.s).reshape(len(part), 1, self.size, *(1,) * (chunks.ndim - 3))
        return namespace(chunks).where(is_padding, 1.0, chunks)

    return _chunks
