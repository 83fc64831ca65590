"""Faults of LUCID's triangular system: masks, and errors that occur only in steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import precondattn as pa
from precondattn.arrays import Array, namespace
from precondattn.cache import Append
from precondattn.spec import lucid
from precondattn.spec.array_functions import identity_like
from precondattn.spec.lucid import TriangularSystem
from precondattn_conformance.faults.fault import (
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
from precondattn_conformance.faults.written_by_hand.written import written

SOLVE = "lucid_solve"


def faults() -> list[Fault]:
    """All faults in this file."""
    return [
        written(
            "lucid_solve[normalize=rows]",
            FORWARD,
            "a row's maximum taken over the future too",
            inside(lucid, "mask_scores", lambda _: lambda visible, scores: scores),
        ),
        written(
            SOLVE,
            STEP,
            "no solve among the new tokens",
            inside(TriangularSystem, "matrix", lambda true: _of_diagonal_only(true)),
        ),
        written(
            SOLVE, STEP, "v kept in place of y", _keeping("solved", lambda call: call.inputs["v"])
        ),
        written(
            SOLVE,
            STEP,
            "the keys' norms not kept",
            _keeping(
                "rms", lambda call: namespace(call.inputs["k"]).ones_like(call.inputs["k"][..., 0])
            ),
        ),
        written(
            "lucid_solve[metric=transported]",
            STEP,
            "a past key's norm that of the reflected key",
            with_call(_with_norms_of_cached_keys),
        ),
    ]


def _of_diagonal_only(true: Function) -> Function:
    def matrix(self: TriangularSystem) -> Array:
        return identity_like(true(self)) * self.diagonal

    return matrix


def _keeping(slot: str, tokens: Callable[[MethodCall], Array]) -> Change:
    def planted(truth: Truth, call: MethodCall) -> MethodResult:
        result = truth(call)
        return replace(result, updates={**result.updates, slot: Append(tokens(call))})

    return planted


def _with_norms_of_cached_keys(call: MethodCall) -> MethodCall:
    assert isinstance(call.mechanism, pa.LucidSolve)
    xp = namespace(call.past["key"])
    mean_square = xp.mean(call.past["key"] ** 2, axis=-1)
    rms = xp.sqrt(mean_square + call.mechanism.eps) * (call.past["rms"] > 0)
    return replace(call, past={**call.past, "rms": rms})
