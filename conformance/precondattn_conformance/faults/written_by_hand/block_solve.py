"""Faults of LUCID's blocked solve, and of steps that read a whole cache at once."""

from __future__ import annotations

from precondattn.arrays import Array, Arrays, namespace
from precondattn.frame import Frame
from precondattn_conformance.faults.fault import BACKWARD, FORWARD, STEP, Fault, Function
from precondattn_conformance.faults.written_by_hand.written import blocked
from precondattn_portable import (
    attention,
    extension,
)
from precondattn_portable.extension import FilledPart
from precondattn_portable.layout import Tile, time_first
from precondattn_portable.lucid_solve import LucidMatrix, LucidSolveBlocks, PastSystem

BOTH = (FORWARD, BACKWARD)

SOLVE = "lucid_solve"


def faults() -> list[Fault]:
    """All faults in this file."""
    return [*_of_the_solve(), *_of_the_unbounded_solve(), *_of_steps()]


def _of_the_solve() -> list[Fault]:
    return [
        blocked(
            SOLVE,
            BOTH,
            "a row block without the preceding blocks",
            LucidMatrix,
            "tiles",
            _own_row_block_only,
        ),
        blocked(
            SOLVE,
            FORWARD,
            "the second block of a row block without the first",
            LucidMatrix,
            "weights",
            _blind_second_block,
        ),
    ]


def _own_row_block_only(true: Function) -> Function:
    def tiles(self: LucidMatrix) -> list[Tile]:
        return [tile._replace(low=tile.i0) for tile in true(self)]

    return tiles


def _blind_second_block(true: Function) -> Function:
    def weights(self: LucidMatrix, tile: Tile) -> Array:
        is_second = tile.high == tile.i0 and (tile.i0 // self.size) % 2 == 1
        return true(self, tile) * (0 if is_second else 1)

    return weights


def _of_the_unbounded_solve() -> list[Fault]:
    return [
        blocked(
            "lucid_solve[normalize=rows]",
            BOTH,
            "a row's maximum from its own block only",
            LucidMatrix,
            "_row_maxima",
            _maxima_of_own,
        ),
    ]


def _maxima_of_own(true: Function) -> Function:
    def _row_maxima(self: LucidMatrix, scores: Array) -> tuple[Array, Array]:
        xp = namespace(scores)
        position = xp.broadcast_to(xp.arange(scores.shape[2])[:, None], scores.shape)
        return scores, position

    return _row_maxima


def _of_steps() -> list[Fault]:
    return [
        blocked(
            SOLVE,
            STEP,
            "the norms of past keys left out",
            PastSystem,
            "__init__",
            lambda true: _changed_after(true, rms=None),
        ),
        blocked(
            SOLVE,
            STEP,
            "no solve among the new tokens",
            LucidSolveBlocks,
            "among_new",
            lambda _: _unsolved,
        ),
        blocked(
            "lucid",
            STEP,
            "fused: no solve among the new tokens",
            LucidSolveBlocks,
            "among_new",
            lambda _: _unsolved,
        ),
        blocked(
            "lucid",
            STEP,
            "fused: the norms of new keys in place of those of the past",
            PastSystem,
            "__init__",
            lambda true: _changed_after(true, rms=lambda self: self.rms * 0 + self.new_rms.mean()),
        ),
        blocked(
            "softmax",
            STEP,
            "sequences of different lengths treated as of one length",
            attention,
            "filled",
            _all_alike,
        ),
        blocked(
            "query_weighted_query",
            STEP,
            "the cache not carried between the parts of a long extension",
            extension,
            "updated",
            lambda _: lambda buffer, *given, **named: buffer,
        ),
    ]


def _unsolved(
    self: LucidSolveBlocks, x: Arrays, right: Array, known: object, frame: Frame
) -> Array:
    y = time_first(right)
    return y if not self.leaf.beta else x["lucid_beta"][..., None] * y


def _all_alike(true: Function) -> Function:
    def filled(frame: Frame, capacity: int) -> FilledPart:
        known: FilledPart = true(frame, capacity)
        return known._replace(offset=known.count, frame=known.frame.replaced(k_valid=None))

    return filled


def _changed_after(true: Function, **values: object) -> Function:
    """An `__init__` that changes some attributes at its end."""

    def changed(self: PastSystem, *given: object, **named: object) -> None:
        true(self, *given, **named)
        for name, value in values.items():
            setattr(self, name, value(self) if callable(value) else value)

    return changed
