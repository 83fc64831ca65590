"""Faults of LUCID's triangular system."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from precondattn.arrays import namespace
from precondattn.cache import Append
from precondattn.frame import Frame
from precondattn.spec import lucid
from precondattn.spec.array_functions import identity_like, row_sum, solve_lower
from precondattn.spec.lucid import LucidSolve, System
from precondattn.spec.metric import Dot
from precondattn.spec.rms_norm import rms
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    Call,
    Fault,
    Result,
    Truth,
    inside,
    with_call,
)
from precondattn_conformance.faults.written_by_hand.written import written

SOLVE = "lucid_solve"


def faults() -> list[Fault]:
    """All faults in this file."""
    return [*_of_the_system(), *_of_the_gradient(), *_of_the_step()]


def _of_the_system() -> list[Fault]:
    return [
        written(
            SOLVE,
            (FORWARD, BACKWARD, STEP),
            "the preceding token masked",
            inside(Frame, "visible", lambda true: _stricter(true)),
        ),
        written(
            SOLVE,
            FORWARD,
            "the diagonal computed in place of 1",
            inside(LucidSolve, "_system", lambda true: _with_literal_diagonal(true)),
        ),
        written(
            SOLVE,
            (FORWARD, STEP),
            "the inverse to first order",
            inside(lucid, "solve_lower", lambda _: _first_order),
        ),
        written(
            SOLVE,
            FORWARD,
            "the system's transpose",
            inside(System, "matrix", lambda true: lambda self: _transposed(true(self))),
        ),
        written(
            SOLVE,
            (FORWARD, BACKWARD),
            "the mean square in place of its root",
            inside(LucidSolve, "_rms", lambda true: lambda self, k: true(self, k) ** 2),
        ),
        written(
            "lucid_solve[scale=0.5]",
            (FORWARD, BACKWARD, STEP),
            "shifted by 1/s, which equals s d only at the default scale",
            inside(LucidSolve, "_system", lambda true: _with_shift_of_root(true)),
        ),
        written(
            "lucid_solve[beta=true]",
            (FORWARD, STEP),
            "β of the key in place of the row's",
            inside(System, "matrix", lambda _: _matrix_with_beta_of_columns),
        ),
        written(
            "lucid_solve[beta=true]",
            (FORWARD, STEP),
            "v not multiplied by β",
            with_call(_with_right_side_undone),
        ),
        written(
            "lucid_solve[normalize=rows]",
            FORWARD,
            "a row's maximum taken over the future too",
            inside(lucid, "mask_scores", lambda _: lambda visible, scores: scores),
        ),
        written(
            "lucid_solve[normalize=none]",
            FORWARD,
            "a unit diagonal",
            inside(lucid.System, "matrix", lambda _: _matrix_of_unit_diagonal),
        ),
    ]


def _stricter(true: Any) -> Any:
    def visible(self: Any, *, causal: bool, window: Any = None, strict: bool = False) -> Any:
        frame = self.replaced(q_position=self.q_position - 1) if strict else self
        return true(frame, causal=causal, window=window, strict=strict)

    return visible


def _with_literal_diagonal(true: Any) -> Any:
    def _system(self: Any, x: Any, scores: Any, frame: Any) -> Any:
        system = true(self, x, scores, frame)
        d = x["k"].shape[3]
        diagonal_scores = row_sum(identity_like(scores) * scores)
        diagonal = namespace(scores).exp(self.scale_for(d) * (diagonal_scores - d))
        return system._replace(diagonal=diagonal)

    return _system


def _first_order(matrix: Any, right: Any) -> Any:
    return right - (matrix - identity_like(matrix)) @ right


def _transposed(x: Any) -> Any:
    return namespace(x).matrix_transpose(x)


def _with_shift_of_root(true: Any) -> Any:
    def _system(self: Any, x: Any, scores: Any, frame: Any) -> Any:
        system = true(self, x, scores, frame)
        scale, d = self.scale_for(x["k"].shape[3]), x["k"].shape[3]
        return system._replace(strict=system.strict * math.exp(scale * d - 1 / scale))

    return _system


def _matrix_with_beta_of_columns(self: Any) -> Any:
    t, s = self.strict.shape[-2:]
    strict = self.strict[..., s - t :]
    return identity_like(strict) * self.diagonal + strict * _transposed(self.beta)


def _with_right_side_undone(call: Call) -> Call:
    """v / β, which the solve then multiplies by β."""
    beta = call.inputs["lucid_beta"]
    beta = namespace(beta).where(beta > 0, beta, 1.0)
    return call.given(v=call.inputs["v"] / beta[..., None])


def _matrix_of_unit_diagonal(self: Any) -> Any:
    t, s = self.strict.shape[-2:]
    strict = self.strict[..., s - t :]
    return identity_like(strict) + self.beta * strict


def _of_the_gradient() -> list[Fault]:
    return [
        written(
            SOLVE,
            BACKWARD,
            "the scores' gradient for the row's key only",
            inside(Dot, "vjp", lambda true: _of_left_only(true)),
        ),
        written(
            SOLVE,
            BACKWARD,
            "the norm constant to the gradient",
            inside(
                lucid,
                "rms_norm_vjp",
                lambda true: lambda k, eps, d: d / rms(k, eps),
            ),
        ),
        written(
            SOLVE,
            BACKWARD,
            "solved forward in place of backward",
            inside(lucid, "solve_upper", lambda _: lambda m, r: solve_lower(_transposed(m), r)),
        ),
        written(
            SOLVE,
            BACKWARD,
            "the system constant to the gradient",
            inside(Dot, "vjp", lambda true: lambda *a: (*tuple(0 * d for d in true(*a)[:2]), {})),
        ),
        written(
            "lucid_solve[beta=true]",
            BACKWARD,
            "X·y in place of X·(v − Σ Φ y), which is equal for β = 1",
            _d_beta_by_the_output,
        ),
        written(
            "lucid_solve[normalize=none]",
            BACKWARD,
            "the diagonal constant to the gradient",
            inside(Dot, "vjp", lambda true: _of_constant_diagonal(true)),
        ),
    ]


def _d_beta_by_the_output(truth: Truth, call: Call) -> Result:
    result = truth(call)
    d_beta = call.inputs["lucid_beta"] * result.gradients["lucid_beta"]
    return replace(result, gradients={**result.gradients, "lucid_beta": d_beta})


def _of_constant_diagonal(true: Any) -> Any:
    def vjp(self: Any, q: Any, k: Any, extra: Any, frame: Any, d_scores: Any) -> Any:
        return true(self, q, k, extra, frame, d_scores * (1 - identity_like(d_scores)))

    return vjp


def _of_left_only(true: Any) -> Any:
    def vjp(self: Any, q: Any, k: Any, *rest: Any) -> Any:
        d_left, d_right, extra = true(self, q, k, *rest)
        return d_left, 0 * d_right, extra

    return vjp


def _of_the_step() -> list[Fault]:
    return [
        written(
            SOLVE,
            STEP,
            "no solve among the new tokens",
            inside(System, "matrix", lambda true: _of_diagonal_only(true)),
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


def _of_diagonal_only(true: Any) -> Any:
    def matrix(self: Any) -> Any:
        return identity_like(true(self)) * self.diagonal

    return matrix


def _keeping(slot: str, tokens: Any) -> Any:
    def planted(truth: Truth, call: Call) -> Result:
        result = truth(call)
        return replace(result, updates={**result.updates, slot: Append(tokens(call))})

    return planted


def _with_norms_of_cached_keys(call: Call) -> Call:
    xp = namespace(call.past["key"])
    mean_square = xp.mean(call.past["key"] ** 2, axis=-1)
    rms = xp.sqrt(mean_square + call.mechanism.eps) * (call.past["rms"] > 0)
    return replace(call, past={**call.past, "rms": rms})
