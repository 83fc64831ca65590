"""Faults of half-precision calls: quantities that should be computed in float32 are not.

    S = Σ k vᵀ,    ⟨q, k⟩ before the maximum is subtracted,    log Φ before the shift

Inputs in half precision are exact; the quantities computed from them need more digits.
"""

from __future__ import annotations

from collections.abc import Callable

from precondattn.arrays import Array, Arrays
from precondattn.frame import Frame
from precondattn.spec import recurrence, softmax
from precondattn.spec.lucid import LucidSolve, TriangularSystem
from precondattn.spec.recurrence import Stream
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    Change,
    Fault,
    Function,
    MethodCall,
    MethodResult,
    Truth,
    inside,
)
from precondattn_conformance.faults.written_by_hand.written import written


def faults() -> list[Fault]:
    """All faults in this file, on PyTorch."""
    changes: tuple[tuple[str, str, Callable[[str], Change]], ...] = (
        ("linear", "the state", _in_state("_add_and_read")),
        ("gated_delta", "the state", _in_state("_correct_and_read")),
        ("softmax", "the logits before the maximum is subtracted", _in_logits),
        ("lucid_solve", "the logits before the shift", _before_shift),
    )
    return [
        written(
            mechanism,
            (FORWARD, BACKWARD),
            f"{what} in {dtype}",
            _in_half_calls(dtype, change(dtype)),
            carrier="autograd",
            library="torch",
        )
        for mechanism, what, change in changes
        for dtype in ("bfloat16", "float16")
    ]


def _in_half_calls(dtype: str, change: Change) -> Change:
    def planted(truth: Truth, call: MethodCall) -> MethodResult:
        return change(truth, call) if call.dtype == dtype else truth(call)

    return planted


def _rounded(x: Array, dtype: str) -> Array:
    import torch

    return x.to(getattr(torch, dtype)).to(x.dtype)


def _in_state(step: str) -> Callable[[str], Change]:
    def change(dtype: str) -> Change:
        def in_half(true: Function) -> Function:
            def stepped(state: Array, token: Stream) -> tuple[Array, Array]:
                state, o = true(state, token)
                return _rounded(state, dtype), o

            return stepped

        return inside(recurrence, step, in_half)

    return change


def _in_logits(dtype: str) -> Change:
    return inside(
        softmax, "log_softmax", lambda true: lambda x, *more: true(_rounded(x, dtype), *more)
    )


def _before_shift(dtype: str) -> Change:
    def in_half(true: Function) -> Function:
        def system(self: LucidSolve, x: Arrays, scores: Array, frame: Frame) -> TriangularSystem:
            changed: TriangularSystem = true(self, x, _rounded(scores, dtype), frame)
            return changed

        return system

    return inside(LucidSolve, "_system", in_half)
