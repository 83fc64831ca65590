"""Faults of decays and reflections: keys of earlier blocks, and state kept or lost by a step."""

from __future__ import annotations

from dataclasses import replace

from precondattn.arrays import Array, Arrays, namespace
from precondattn.cache import Replace, Rewrite
from precondattn.frame import Frame
from precondattn.spec.transported import Transported
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    Change,
    Fault,
    Function,
    MethodCall,
    MethodResult,
    Truth,
    inside,
    with_call,
)
from precondattn_conformance.faults.written_by_hand.written import blocked, written
from precondattn_portable import extension, transported_step
from precondattn_portable.forget_gate import ForgetGate
from precondattn_portable.layout import Tile
from precondattn_portable.transported import TransportedScores

BOTH = (FORWARD, BACKWARD)

FORGETFUL = "softmax[forget=unscaled]"


def faults() -> list[Fault]:
    """All faults in this file."""
    return [*_of_blocks(), *_of_steps(), *_of_steps_in_blocks()]


def _of_blocks() -> list[Fault]:
    return [
        blocked(
            FORGETFUL,
            BOTH,
            "the keys of earlier blocks no longer decay",
            ForgetGate,
            "_advance",
            _advanced_for_new_only,
        ),
        blocked(
            FORGETFUL,
            BACKWARD,
            "the gates' gradient from the keys of their own block only",
            ForgetGate,
            "_pull_gates",
            _pulling_own_only,
        ),
        blocked(
            "path",
            FORWARD,
            "the keys carried to the block before",
            TransportedScores,
            "_carry_to",
            lambda true: lambda self, a: true(self, max(a - self.chunks_per_row_block, 0)),
        ),
    ]


def _advanced_for_new_only(true: Function) -> Function:
    def _advance(self: ForgetGate, p0: int) -> None:
        start = self.position
        kept = self.since[..., :start] + 0
        true(self, p0)
        self.since[..., :start] = kept

    return _advance


def _pulling_own_only(true: Function) -> Function:
    def _pull_gates(self: ForgetGate, tile: Tile, d_row_block: Array) -> None:
        p0 = self.offset + tile.i0
        true(self, tile._replace(low=p0), d_row_block[..., p0 - tile.low :])

    return _pull_gates


def _of_steps() -> list[Fault]:
    return [
        written(
            "path",
            STEP,
            "the past keys reflected in reversed order of time",
            inside(Transported, "advance", lambda true: _advanced_backwards(true)),
        ),
        written(
            "path[flush=2]",
            STEP,
            "the reflections since the last flush forgotten",
            with_call(lambda call: replace(call, past=_without_pending(call.past))),
        ),
        written(
            "path[flush=2]",
            STEP,
            "the pending reflections kept after the flush",
            _with_pending_kept(),
        ),
    ]


def _advanced_backwards(true: Function) -> Function:
    def advance(self: Transported, past: Array, k: Array, extra: Arrays, frame: Frame) -> Array:
        xp = namespace(k)
        backwards = {name: xp.flip(array, axis=2) for name, array in extra.items()}
        return true(self, past, k, backwards, frame)

    return advance


def _without_pending(past: Arrays) -> Arrays:
    return {name: 0 * a if name.startswith("pending") else a for name, a in past.items()}


def _with_pending_kept() -> Change:
    def kept(truth: Truth, call: MethodCall) -> MethodResult:
        result = truth(call)
        for name, update in result.updates.items():
            if name.startswith("pending"):
                assert isinstance(update, Replace)
                stale = update.value == 0
                update.value[...] = namespace(update.value).where(
                    stale, call.past[name], update.value
                )
        return result

    return kept


def _of_steps_in_blocks() -> list[Fault]:
    return [
        blocked(
            "path[flush=2]",
            STEP,
            "the pending reflections not kept",
            transported_step,
            "padded",
            lambda true: lambda *given, **named: 0 * true(*given, **named),
        ),
        written(
            "path[flush=2]",
            STEP,
            "a flush rewrites only the new keys",
            _keeping_past_keys,
            carrier="blocks",
        ),
        blocked(
            "path",
            STEP,
            "the cache not carried between the parts of a long extension",
            extension,
            "updated",
            lambda _: lambda buffer, *given, **named: buffer,
        ),
    ]


def _keeping_past_keys(truth: Truth, call: MethodCall) -> MethodResult:
    result = truth(call)
    update = result.updates["key"]
    if isinstance(update, Rewrite):
        update = Rewrite(call.past["key"], update.tokens)
    return replace(result, updates={**result.updates, "key": update})
