"""Faults of the forget gate, and of PaTH's metric."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from precondattn.arrays import namespace
from precondattn.spec import forget_gate, transported
from precondattn.spec.transported import Reflections, Tokens, Transported
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    Call,
    Change,
    Fault,
    Result,
    Truth,
    inside,
    with_call,
)
from precondattn_conformance.faults.tokens import rolled
from precondattn_conformance.faults.written_by_hand.written import written

BOTH = (FORWARD, BACKWARD)

FORGETFUL = "softmax[forget=unscaled]"


def faults() -> list[Fault]:
    """All faults in this file."""
    return [*_of_forget_gate(), *_of_path()]


def _of_forget_gate() -> list[Fault]:
    return [
        written(
            FORGETFUL,
            (FORWARD, STEP),
            "a key decays by its own gate",
            inside(forget_gate, "_follows", lambda _: _at_or_after),
        ),
        written(
            FORGETFUL,
            BACKWARD,
            "a gate's gradient given to the following token",
            inside(forget_gate, "decay_vjp", lambda true: lambda d: rolled(true(d), 1)),
        ),
        written(
            FORGETFUL,
            STEP,
            "the decay kept without the last of the new tokens",
            inside(forget_gate, "extended_decay", lambda true: _decay_without_last(true)),
        ),
        written(
            FORGETFUL,
            STEP,
            "the decay since the key not read",
            inside(
                forget_gate,
                "extended_decay",
                lambda true: lambda past, g: (true(0 * past, g)[0], true(past, g)[1]),
            ),
        ),
    ]


def _at_or_after(array: Any, s: int) -> Any:
    token = namespace(array).arange(s)
    return token[:, None] >= token[None, :]


def _decay_without_last(true: Any) -> Any:
    def extended_decay(past: Any, g: Any) -> Any:
        fewer = g * 1
        fewer[:, -1] = 0
        return true(past, g)[0], true(past, fewer)[1]

    return extended_decay


def _of_path() -> list[Fault]:
    strictly, not_strictly = ({"strict": strict} for strict in (True, False))
    return [
        written(
            "path",
            BOTH,
            "a query not reflected by its own token",
            inside(Tokens, "follow", lambda true: lambda a, b, strict: true(a, b, **strictly)),
        ),
        written(
            "path",
            STEP,
            "a key reflected by its own token",
            inside(Tokens, "follow", lambda true: lambda a, b, strict: true(a, b, **not_strictly)),
        ),
        written(
            "path",
            (FORWARD, STEP),
            "each reflection alone in place of their product",
            inside(Reflections, "gathered", lambda _: lambda self, right: self.beta * right),
        ),
        written(
            "path",
            BACKWARD,
            "the reflections' overlap constant to the gradient",
            inside(Reflections, "overlap", lambda true: lambda self: 0 * true(self)),
        ),
        written(
            "path",
            (FORWARD, STEP),
            "the reflection I - 2 β w wᵀ",
            with_call(lambda call: call.given(beta=2 * call.inputs["beta"])),
        ),
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
            "the keys flushed a token early",
            inside(transported, "_count", lambda true: lambda frame: true(frame) + 1),
        ),
        written(
            "path[flush=2]",
            STEP,
            "the pending reflections kept after the flush",
            _with_pending_kept(),
        ),
    ]


def _advanced_backwards(true: Any) -> Any:
    def advance(self: Any, past: Any, k: Any, extra: Any, frame: Any) -> Any:
        xp = namespace(k)
        backwards = {name: xp.flip(array, axis=2) for name, array in extra.items()}
        return true(self, past, k, backwards, frame)

    return advance


def _without_pending(past: dict[str, Any]) -> dict[str, Any]:
    return {name: 0 * a if name.startswith("pending") else a for name, a in past.items()}


def _with_pending_kept() -> Change:
    def kept(truth: Truth, call: Call) -> Result:
        result = truth(call)
        for name, update in result.updates.items():
            if name.startswith("pending"):
                stale = update.value == 0
                update.value[...] = namespace(update.value).where(
                    stale, call.past[name], update.value
                )
        return result

    return kept
