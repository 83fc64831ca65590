"""Faults of blocked decays and reflections: the forget gate's columns, PaTH's chunks, flushes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from precondattn.cache import Rewrite
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    Call,
    Fault,
    Result,
    Truth,
)
from precondattn_conformance.faults.written_by_hand.written import blocked, written
from precondattn_conformance.faults.written_by_hand.wrong import (
    first_order,
)
from precondattn_portable import (
    extension,
    transported,
    transported_step,
)
from precondattn_portable.forget_gate import ForgetGate
from precondattn_portable.transported import TransportedScores

BOTH = (FORWARD, BACKWARD)

FORGETFUL = "softmax[forget=unscaled]"


def faults() -> list[Fault]:
    """All faults in this file."""
    return [*_of_forget_gate(), *_of_reflections(), *_of_steps_of_path()]


def _of_forget_gate() -> list[Fault]:
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
            "pull",
            _pulling_own_only,
        ),
    ]


def _advanced_for_new_only(true: Any) -> Any:
    def _advance(self: Any, p0: int) -> None:
        start = self.position
        kept = self.since[..., :start] + 0
        true(self, p0)
        self.since[..., :start] = kept

    return _advance


def _pulling_own_only(true: Any) -> Any:
    def pull(self: Any, p0: int, p1: int, low: int, d_row_block: Any) -> None:
        true(self, p0, p1, p0, d_row_block[..., p0 - low :])

    return pull


def _of_reflections() -> list[Fault]:
    return [
        blocked(
            "path",
            FORWARD,
            "the keys carried to the block before",
            TransportedScores,
            "_carry_to",
            lambda true: lambda self, a: true(self, max(a - self.chunks_per_row_block, 0)),
        ),
        blocked(
            "path",
            FORWARD,
            "a query reflected by future tokens",
            TransportedScores,
            "_lower",
            lambda _: lambda self, x: x,
        ),
        blocked(
            "path",
            BACKWARD,
            "the reflections of a chunk to first order",
            transported,
            "unit_lower_inverse",
            lambda _: first_order,
        ),
        blocked(
            "path",
            BACKWARD,
            "the products of whole chunks constant to the gradient",
            TransportedScores,
            "_pull_past",
            _pulling_no_products,
        ),
        blocked(
            "path",
            BACKWARD,
            "the transported keys of earlier chunks constant to the gradient",
            TransportedScores,
            "_finish",
            _finished_without_keys,
        ),
        blocked(
            "lucid_solve[metric=transported]",
            BACKWARD,
            "the products of whole chunks constant to the gradient",
            TransportedScores,
            "_pull_past",
            _pulling_no_products,
        ),
    ]


def _pulling_no_products(true: Any) -> Any:
    def _pull_past(self: Any, low: int, old: int, d_row_block: Any) -> Any:
        kept = self.d_whole + 0
        result = true(self, low, old, d_row_block)
        self.d_whole[...] = kept
        return result

    return _pull_past


def _finished_without_keys(true: Any) -> Any:
    def _finish(self: Any) -> None:
        if not self.is_finished:
            self.d_keys[...] = 0
        true(self)

    return _finish


def _of_steps_of_path() -> list[Fault]:
    return [
        blocked(
            "path",
            STEP,
            "the reflections of a step to first order",
            transported_step,
            "unit_lower_inverse",
            lambda _: first_order,
        ),
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


def _keeping_past_keys(truth: Truth, call: Call) -> Result:
    result = truth(call)
    update = result.updates["key"]
    if isinstance(update, Rewrite):
        update = Rewrite(call.past["key"], update.tokens)
    return replace(result, updates={**result.updates, "key": update})
