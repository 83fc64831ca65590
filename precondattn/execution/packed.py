"""A packed call computed as batches of its segments, if these are known on the host.

    o[tokens of segment i] = mechanism(x[tokens of segment i])

Segments of similar lengths are moved into one batch, padded to the longest of them, which is an
ordinary call. So no pair of tokens of different segments is computed. Backends that skip such pairs
themselves get the packed call (`Backend.segments_as_batch`). So do all backends if segments are
traced, and for mechanisms that compute no pairs, such as recurrences, which reset their state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from precondattn.algebra.declaration import Pattern
from precondattn.algebra.piece import Piece
from precondattn.arrays import (
    host_array,
    is_traced,
    namespace,
    on_device_of,
    split_rows,
    zero_where_not,
)
from precondattn.dispatch.plan import PlannedCall
from precondattn.execution import evaluation
from precondattn.execution.arguments import BoundCall
from precondattn.execution.preparation import prepared_part, times
from precondattn.frame import full_frame, runs
from precondattn.frameworks import of
from precondattn.frameworks.types import Array, Arrays
from precondattn.limits import KEPT

SIMILAR = 0.8
"""The least fraction of the longest segment's tokens that the segments of a batch must have …"""

FEW = 16
"""… unless they are at most this many tokens shorter."""


def divided(mechanism: Piece, call: BoundCall) -> DividedPacking | None:
    """The batches of a packed call; None if it is not divided."""
    segments, (t, s) = call.segments, times(call.sizes)
    if segments is None or t != s:  # With t < s the first segments have fewer queries than keys.
        return None
    if call.frame.masks_pairs:  # Backends apply these masks to the packed call.
        return None
    if not any(map(_wants_batches, call.prepared.plan.calls)) or not _is_divisible(mechanism):
        return None
    valid = None if call.lengths is None else host_array(call.lengths)
    if any(map(is_traced, call.inputs.values())) or (call.lengths is not None and valid is None):
        return None
    lengths, moves = _split(segments, valid)
    return DividedPacking(mechanism, call, lengths, moves) if lengths else None


def _wants_batches(planned: PlannedCall) -> bool:
    """Whether a piece computes pairs of tokens on a backend that does not skip other segments."""
    program = planned.piece.program
    keeps = any(pattern.keeps_tokens for _, pattern in program.slots.values())
    relates_pairs = keeps or any(not leaf.offers.causal for leaf in program.leaves)
    return relates_pairs and planned.backend.segments_as_batch


@lru_cache(maxsize=KEPT)
def _is_divisible(mechanism: Piece) -> bool:
    """Whether inputs and output have both a batch and a time axis in front, or neither."""
    patterns = (*mechanism.inputs.values(), mechanism.program.output)
    return all(is_of_tokens(p) or not set(p.letters) & set("bts") for p in patterns)


def is_of_tokens(pattern: Pattern) -> bool:
    is_first = pattern.letters[:2] in ("bt", "bs") and not pattern.is_pairwise
    return is_first and not any(axis.broadcasts or axis.multiple > 1 for axis in pattern.axes[:2])


def _split(
    segments: np.ndarray, valid: np.ndarray | None
) -> tuple[list[np.ndarray], MovedRows | None]:
    """The lengths of the segments in each batch, and the moves of tokens (b s) to their slots.

    The first `valid` (b,) of the segment ids (b, s) of each sequence are not padding.
    """
    b, s = segments.shape
    starts, lengths = runs(segments)
    if valid is not None:
        lengths = np.minimum(lengths, valid[starts // s] - starts % s)
        starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    if not len(starts):
        return [], None
    groups = similar(lengths)
    return [lengths[members] for members in groups], moves_to(groups, starts, lengths, b * s)


def moves_to(
    groups: list[np.ndarray], starts: np.ndarray, lengths: np.ndarray, count: int
) -> MovedRows | None:
    """The moves of `count` tokens to the slots of groups of segments; None if none moves.

    Each segment has as many slots as the longest of its group, and at least one.
    """
    tokens, are_tokens = [], []
    for members in groups:
        offset = np.arange(max(lengths[members].max(), 1))
        last = lengths[members][:, None] - 1
        place = starts[members][:, None] + np.minimum(offset, np.maximum(last, 0))
        tokens.append(np.minimum(place, count - 1).ravel())
        are_tokens.append((offset <= last).ravel())
    return _moves(np.concatenate(tokens), np.concatenate(are_tokens), count)


def similar(lengths: np.ndarray) -> list[np.ndarray]:
    """Groups of segments with similar lengths; a group keeps the order of its segments."""
    longest: list[int] = []
    for length in np.unique(lengths)[::-1].tolist():
        if not longest or length < min(SIMILAR * longest[-1], longest[-1] - FEW):
            longest.append(length)
    shortest = [*(above + 1 for above in longest[1:]), 0]
    groups = [
        np.flatnonzero((low <= lengths) & (lengths <= high))
        for low, high in zip(shortest, longest, strict=True)
    ]
    return sorted(groups, key=lambda group: int(group[0]))


def _moves(tokens: np.ndarray, are_tokens: np.ndarray, count: int) -> MovedRows | None:
    """Moves that fill slot i with token `tokens[i]`, or padding; None if no token moves."""
    if len(tokens) == count and are_tokens.all() and (tokens == np.arange(count)).all():
        return None
    slots, is_moved = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=bool)
    slots[tokens[are_tokens]] = np.flatnonzero(are_tokens)
    is_moved[tokens[are_tokens]] = True
    has_source = None if are_tokens.all() else are_tokens
    return MovedRows(tokens, has_source, slots, None if is_moved.all() else is_moved)


class MovedRows(NamedTuple):
    """The source of each row, and its inverse. No row is moved to two places."""

    sources: Array
    has_source: Array
    """Whether a place gets a row; None if all do."""
    slots: Array
    """The place that each row is moved to."""
    is_moved: Array
    """Whether a row is moved; None if all are."""

    @property
    def back(self) -> MovedRows:
        return MovedRows(self.slots, self.is_moved, self.sources, self.has_source)


def moved(array: Array, rows: MovedRows) -> Array:
    """The array with its rows (first axis) moved."""
    result = of(array).moved_rows(array, rows)
    return taken(array, rows) if result is None else result


def taken(array: Array, rows: MovedRows) -> Array:
    xp = namespace(array)
    result = xp.take(array, rows.sources, axis=0)
    if rows.has_source is None:
        return result
    has_source = xp.reshape(rows.has_source, (-1, *(1,) * (array.ndim - 1)))
    if result.dtype == xp.bool:
        return result & has_source
    return zero_where_not(has_source, result)


class Batches:
    """The sequences of packed arrays (b, s, …), moved into batches of similar lengths."""

    sizes: tuple[tuple[int, int], ...]
    """(sequences, tokens) of each batch."""
    of_tokens: list[str]
    """The inputs with an axis of tokens."""

    def __init__(self, rows: int, moves: MovedRows | None, like: Array) -> None:
        self.rows, self.moves = rows, moves
        if moves is not None:
            self.moves = MovedRows(*[None if a is None else on_device_of(like, a) for a in moves])

    def gathered(self, array: Array) -> list[Array]:
        """The array (sequences, longest, …) of each batch, from an array (b, s, …)."""
        xp, rest = namespace(array), array.shape[2:]
        slots = xp.reshape(array, (-1, *rest))
        if self.moves is not None:
            slots = moved(slots, self.moves)
        parts = split_rows(slots, [b * t for b, t in self.sizes])
        each = zip(parts, self.sizes, strict=True)
        return [xp.reshape(part, (*size, *rest)) for part, size in each]

    def returned(self, parts: Sequence[Array]) -> Array:
        """An array (b, s, …), from the arrays of the batches; 0 at tokens of no sequence."""
        xp, rest = namespace(parts[0]), parts[0].shape[2:]
        flat = [xp.reshape(part, (-1, *rest)) for part in parts]
        tokens = flat[0] if len(flat) == 1 else xp.concat(flat, axis=0)
        if self.moves is not None:
            tokens = moved(tokens, self.moves.back)
        return xp.reshape(tokens, (self.rows, tokens.shape[0] // self.rows, *rest))

    def gradients(self, parts: Sequence[Arrays]) -> Arrays:
        """The gradients of the packed inputs, from those of the batches."""
        return {
            name: self.returned([part[name] for part in parts])
            if name in self.of_tokens
            else sum(part[name] for part in parts)
            for name in parts[0]
        }


class DividedPacking(Batches):
    """A packed call and its batches, which are ordinary bound calls."""

    def __init__(
        self, mechanism: Piece, call: BoundCall, lengths: list[np.ndarray], moves: MovedRows | None
    ) -> None:
        super().__init__(call.sizes["b"], moves, next(iter(call.inputs.values())))
        self.mechanism, self.call, self.lengths = mechanism, call, lengths
        self.sizes = tuple((len(each), int(each.max())) for each in lengths)
        patterns = mechanism.inputs
        self.of_tokens = [name for name in call.inputs if is_of_tokens(patterns[name])]

    @property
    def largest(self) -> BoundCall:
        return max(self.calls(), key=lambda call: call.sizes["b"] * times(call.sizes)[0])

    def calls(self) -> list[BoundCall]:
        """The bound calls of the batches."""
        inputs = {name: self.gathered(self.call.inputs[name]) for name in self.of_tokens}
        masks: Sequence[Array | None] = [None] * len(self.lengths)
        if "key_mask" in self.call.prepared.request.masks:  # `k_valid` masks padding too.
            masks = self.gathered(self.call.frame.k_valid)
        return [
            self._bound(i, {**self.call.inputs, **{n: a[i] for n, a in inputs.items()}}, mask)
            for i, mask in enumerate(masks)
        ]

    def _bound(self, batch: int, inputs: Arrays, key_mask: Array | None) -> BoundCall:
        like, lengths, (b, t) = next(iter(inputs.values())), None, self.sizes[batch]
        if (self.lengths[batch] < t).any():
            lengths = on_device_of(like, self.lengths[batch].astype(np.int32))
        named = {"lengths": lengths, "key_mask": key_mask}
        masks = frozenset(name for name, mask in named.items() if mask is not None)
        sizes = {**self.call.sizes, **{n: t for n in "ts" if n in self.call.sizes}, "b": b}
        ready = prepared_part(self.mechanism, self.call.prepared, inputs, sizes, masks)
        frame, before = full_frame(t, t, like, **named), self.call.dtypes_before
        return BoundCall(ready, inputs, frame, lengths, dtypes_before=before)


def forward(divided: DividedPacking, evaluate: Callable[[BoundCall], Array]) -> Array:
    """The output of the packed call; `evaluate` computes each batch."""
    out = divided.returned([evaluate(call) for call in divided.calls()])
    with of(out).without_autocast(out):
        return evaluation.finished(out, divided.call)


def vjp(divided: DividedPacking) -> tuple[Array, Callable[[Array], Arrays]]:
    """The output of the packed call and its pullback, from those of each batch."""
    calls = divided.calls()
    outputs, pulls = zip(*map(evaluation.vjp, calls), strict=True)

    def pullback(cotangent: Array) -> Arrays:
        used = evaluation.finished(cotangent, divided.call, is_cotangent=True)
        cotangents = divided.gathered(used)
        parts = [pull(part) for pull, part in zip(pulls, cotangents, strict=True)]
        return divided.gradients(parts)

    return evaluation.finished(divided.returned(outputs), divided.call), pullback
