"""New tokens of ragged sequences: each sequence gets a different number of them in a call.

    lengths 7 and 4, calls that end at 3, 4, 5 and 7 tokens
      →  sequence 1 ends at 1, 2, 2 and 4: it gets 1, 1, 0 and 2 new tokens

A sequence's new tokens are at the start of its row; the rest is padding. A sequence that is shorter
than others goes on decoding, as in a batch of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import precondattn as pa
from precondattn.algebra.declaration import Pattern
from precondattn.arrays import Array, Arrays
from precondattn_conformance.inputs import CallLayout, slice_tokens


class RaggedCall(NamedTuple):
    """The new tokens of one call, by sequence."""

    starts: np.ndarray
    stops: np.ndarray
    is_ragged: bool
    width: int
    """The number of rows of the call, padding included."""

    @property
    def counts(self) -> np.ndarray:
        """The number of new tokens of each sequence: the `lengths` of the call."""
        return np.asarray(self.stops - self.starts)

    @property
    def tokens(self) -> np.ndarray:
        """The token index of each row (b, width). In padding it is the index of some other
        token."""
        last = np.maximum(self.stops - 1, 0)[:, None]
        return np.asarray(np.minimum(self.starts[:, None] + np.arange(self.width), last))

    def masks(self, masks: Arrays, array: Callable[[np.ndarray], Array]) -> Arrays:
        """The arguments `lengths` and `key_mask` of the call, from those of the whole call."""
        options: Arrays = {"lengths": array(self.counts)} if self.is_ragged else {}
        if "key_mask" in masks:
            options["key_mask"] = array(np.take_along_axis(masks["key_mask"], self.tokens, 1))
        return options


def calls(layout: CallLayout, ends: list[int]) -> list[RaggedCall]:
    """Calls that end at these tokens of the longest sequence, and proportionally in the others."""
    lengths = layout.masks().get("lengths")
    is_ragged = lengths is not None
    total = np.full(layout.b, layout.t) if lengths is None else lengths
    made = []
    starts = np.zeros(layout.b, dtype=int)
    for end in ends:
        stops = total * end // layout.t
        made.append(RaggedCall(starts, stops, is_ragged, max(int(np.max(stops - starts)), 1)))
        starts = stops
    return made


def new_tokens(mechanism: pa.Mechanism, inputs: Arrays, call: RaggedCall) -> Arrays:
    """The inputs of a call of `extend`; inputs of pairs keep all key columns."""
    if not call.is_ragged:
        return slice_tokens(mechanism, inputs, int(call.starts[0]), int(call.stops[0]))
    return {
        name: _gathered(array, mechanism.inputs[name].time_axis, call.tokens)
        for name, array in inputs.items()
    }


def _gathered(array: np.ndarray, axis: int | None, tokens: np.ndarray) -> np.ndarray:
    """The rows of each sequence along an axis; the batch is the first axis."""
    if axis is None:
        return array
    array = np.broadcast_to(array, (len(tokens), *array.shape[1:]))
    index = tokens.reshape(tokens.shape[:1] + (1,) * (axis - 1) + tokens.shape[1:])
    return np.take_along_axis(
        array, index.reshape(index.shape + (1,) * (array.ndim - axis - 1)), axis
    )


def with_columns(pattern: Pattern, array: np.ndarray, capacity: int | None) -> np.ndarray:
    """An input of pairs of query and key with as many key columns as a cache has slots."""
    if not pattern.is_pairwise or capacity is None:
        return array
    array = array[..., :capacity]
    padding = [(0, 0)] * (array.ndim - 1) + [(0, capacity - array.shape[-1])]
    return np.pad(array, padding, constant_values=7.0)


def rows_of(array: np.ndarray, call: RaggedCall) -> np.ndarray:
    """The part of an array (b, tokens, …) of the full call that is one call's; 0 in padding."""
    shape = (*call.tokens.shape, *(1,) * (array.ndim - 2))
    rows = np.take_along_axis(array, call.tokens.reshape(shape), 1)
    is_token = np.arange(call.width) < call.counts[:, None]
    return np.where(is_token.reshape(shape), rows, 0.0)
