"""A packed call as batches of its segments, where these are known on the host.

    o[tokens of segment i] = mechanism(x[tokens of segment i])

Segments do not depend on each other. So those of similar lengths are moved into one batch, padded
to the longest of them, and the batches are ordinary calls: no pair of tokens of different segments
is computed. A packed call then costs what its batches cost, and two moves of rows.

    gathered:   y[slot]  = x[token of slot],   0 in slots of padding
    returned:   o[token] = out[slot of token], 0 for tokens of no segment

Each of the two is the other's transpose, which is its gradient.

Backends that skip other segments by themselves get the packed call (`Backend.segments_as_batch`),
as do all where segments are traced, and mechanisms that relate no pairs of tokens: a recurrence
resets its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from precondattn.algebra.declaration import Pattern
from precondattn.algebra.piece import Piece
from precondattn.arrays import (
    Array,
    Arrays,
    host_array,
    is_traced,
    namespace,
    on_device_of,
    split_rows,
)
from precondattn.dispatch.plan import CallPlan
from precondattn.execution import evaluation
from precondattn.execution.arguments import BoundCall
from precondattn.execution.moved_rows import MovedRows, moved
from precondattn.execution.preparation import prepared_part, times
from precondattn.execution.torch import autocast
from precondattn.frame import full_frame, runs
from precondattn.limits import KEPT

SIMILAR = 0.8
"""Segments of a batch have at least this part of the longest one's tokens …"""

FEW = 16
"""… or at most so many tokens less."""


class Batch(NamedTuple):
    """Segments of similar lengths."""

    longest: int
    lengths: np.ndarray
    """(segments,)"""

    @property
    def slots(self) -> int:
        return len(self.lengths) * self.longest

    @property
    def is_full(self) -> bool:
        return bool((self.lengths == self.longest).all())


def divided(mechanism: Piece, call: BoundCall) -> DividedPacking | None:
    """The batches of a call; None where it is computed as it is."""
    segments, plan = call.segments, call.prepared.plan
    if segments is None or not _wants_batches(plan) or not _is_divisible(mechanism):
        return None
    t, s = times(call.sizes)
    if t != s:
        return None  # The first segments have fewer queries than keys.
    if any(map(is_traced, call.inputs.values())):
        return None
    valid = None if call.lengths is None else host_array(call.lengths)
    if call.lengths is not None and valid is None:
        return None
    batches, moves = _split(segments, valid)
    return DividedPacking(mechanism, call, batches, moves) if batches else None


def _wants_batches(plan: CallPlan) -> bool:
    """Whether a piece that relates pairs of tokens runs on a backend that does not skip any."""
    return any(
        getattr(planned.backend, "segments_as_batch", False) and _relates_pairs(planned.piece)
        for planned in plan.calls
    )


def _relates_pairs(piece: Piece) -> bool:
    """Whether it keeps tokens, or would if it were causal."""
    keeps = any(pattern.keeps_tokens for _, pattern in piece.program.slots.values())
    return keeps or any(not leaf.offers.causal for leaf in piece.program.leaves)


@lru_cache(maxsize=KEPT)
def _is_divisible(mechanism: Piece) -> bool:
    """Whether inputs and output have sequences and tokens as their first axes, or neither."""
    patterns = (*mechanism.inputs.values(), mechanism.program.output)
    return all(_is_of_tokens(p) or not set(p.letters) & set("bts") for p in patterns)


def _is_of_tokens(pattern: Pattern) -> bool:
    is_first = pattern.letters[:2] in ("bt", "bs") and not pattern.is_pairwise
    return is_first and not any(axis.broadcasts or axis.multiple > 1 for axis in pattern.axes[:2])


def _split(segments: np.ndarray, valid: np.ndarray | None) -> tuple[list[Batch], MovedRows | None]:
    """The batches for segment ids (b, s), of which `valid` (b,) tokens are no padding.

    With them how tokens (b s) are moved to the slots of all batches; None where they are in order.
    """
    b, s = segments.shape
    starts, lengths = runs(segments)
    if valid is not None:
        lengths = np.minimum(lengths, valid[starts // s] - starts % s)
        starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    if not len(starts):
        return [], None
    batches: list[Batch] = []
    tokens, are_tokens = [], []
    for members in _similar(lengths):
        batch = Batch(int(lengths[members].max()), lengths[members])
        offset = np.arange(batch.longest)
        last = batch.lengths[:, None] - 1
        tokens.append((starts[members][:, None] + np.minimum(offset, last)).ravel())
        are_tokens.append((offset <= last).ravel())
        batches.append(batch)
    return batches, _moves(np.concatenate(tokens), np.concatenate(are_tokens), b * s)


def _similar(lengths: np.ndarray) -> list[np.ndarray]:
    """Groups of segments of similar lengths; those of a group keep their order."""
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
    """Slot i has token `tokens[i]`, or padding where `are_tokens[i]` is false."""
    if len(tokens) == count and (tokens == np.arange(count)).all():
        return None
    slots, is_moved = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=bool)
    slots[tokens[are_tokens]] = np.flatnonzero(are_tokens)
    is_moved[tokens[are_tokens]] = True
    return MovedRows(
        tokens,
        None if are_tokens.all() else are_tokens,
        slots,
        None if is_moved.all() else is_moved,
    )


# ------------------------------------------------------------------------------------ calls


class DividedPacking:
    """A packed call and its batches, each of which is an ordinary bound call."""

    def __init__(
        self, mechanism: Piece, call: BoundCall, batches: list[Batch], moves: MovedRows | None
    ) -> None:
        self.mechanism, self.call, self.batches = mechanism, call, batches
        like = next(iter(call.inputs.values()))
        self.moves = None if moves is None else moves.on_device_of(like)
        patterns = mechanism.inputs
        self.of_tokens = [name for name in call.inputs if _is_of_tokens(patterns[name])]

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """The numbers of sequences and of tokens of each batch."""
        return tuple((len(batch.lengths), batch.longest) for batch in self.batches)

    @property
    def largest(self) -> BoundCall:
        slots = [batch.slots for batch in self.batches]
        return self.calls()[slots.index(max(slots))]

    def calls(self) -> list[BoundCall]:
        """The bound calls of the batches."""
        inputs = {name: self.gathered(self.call.inputs[name]) for name in self.of_tokens}
        masks: Sequence[Array | None] = [None] * len(self.batches)
        if "key_mask" in self.call.masks:  # Padding is masked in it too, as it is in the batches.
            masks = self.gathered(self.call.frame.k_valid)
        return [
            self._bound(batch, {**self.call.inputs, **{n: a[i] for n, a in inputs.items()}}, mask)
            for i, (batch, mask) in enumerate(zip(self.batches, masks, strict=True))
        ]

    def _bound(self, batch: Batch, inputs: Arrays, key_mask: Array | None) -> BoundCall:
        like = next(iter(inputs.values()))
        count, t = len(batch.lengths), batch.longest
        lengths = None
        if not batch.is_full:
            lengths = on_device_of(like, batch.lengths.astype(np.int32))
        named = {"lengths": lengths, "key_mask": key_mask}
        masks = frozenset(name for name, mask in named.items() if mask is not None)
        sizes = {**self.call.sizes, **{n: t for n in "ts" if n in self.call.sizes}, "b": count}
        ready = prepared_part(self.mechanism, self.call.prepared, inputs, sizes, masks)
        frame, before = full_frame(t, t, like, **named), self.call.dtypes_before
        return BoundCall(ready, inputs, frame, lengths, dtypes_before=before)

    def gathered(self, array: Array) -> list[Array]:
        """The part (segments, longest, …) of each batch, from (b, s, …)."""
        xp, rest = namespace(array), array.shape[2:]
        slots = xp.reshape(array, (-1, *rest))
        if self.moves is not None:
            slots = moved(slots, self.moves)
        parts = split_rows(slots, [batch.slots for batch in self.batches])
        return [
            xp.reshape(part, (len(batch.lengths), batch.longest, *rest))
            for part, batch in zip(parts, self.batches, strict=True)
        ]

    def returned(self, parts: Sequence[Array]) -> Array:
        """(b, s, …), from the part of each batch."""
        xp, rest = namespace(parts[0]), parts[0].shape[2:]
        flat = [xp.reshape(part, (-1, *rest)) for part in parts]
        tokens = flat[0] if len(flat) == 1 else xp.concat(flat, axis=0)
        if self.moves is not None:
            tokens = moved(tokens, self.moves.back)
        b = self.call.sizes["b"]
        return xp.reshape(tokens, (b, tokens.shape[0] // b, *rest))


def forward(divided: DividedPacking, evaluate: Callable[[BoundCall], Array]) -> Array:
    """The output of the packed call, by `evaluate` of each batch."""
    out = divided.returned([evaluate(call) for call in divided.calls()])
    with autocast.off(out):
        return evaluation.finished(out, divided.call)


def vjp(divided: DividedPacking) -> tuple[Array, Callable[[Array], Arrays]]:
    """The output of the packed call and its pullback, by those of each batch."""
    calls = divided.calls()
    outputs, pulls = zip(*(evaluation.vjp(call.prepared.plan, call) for call in calls), strict=True)

    def pullback(cotangent: Array) -> Arrays:
        cotangents = divided.gathered(evaluation.used_part(cotangent, divided.call))
        parts = [pull(part) for pull, part in zip(pulls, cotangents, strict=True)]
        return {
            name: divided.returned([part[name] for part in parts])
            if name in divided.of_tokens
            else sum(part[name] for part in parts)
            for name in divided.call.inputs
        }

    return evaluation.finished(divided.returned(outputs), divided.call), pullback
