"""Faults of leaves that treat each token alone: norms, feature maps, temperatures, gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from precondattn.arrays import namespace
from precondattn.spec import contraction_gate, hedgehog, l2_norm, layer_norm, rms_norm, scaled_dims
from precondattn.spec import norm as of_norms
from precondattn.spec import unit_rows as of_rows
from precondattn.spec.array_functions import row_sum
from precondattn.spec.unit_rows import UnitRows
from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    STEP_BACKWARD,
    Call,
    Fault,
    Result,
    Truth,
    inside,
    with_call,
    with_output,
)
from precondattn_conformance.faults.written_by_hand.written import written

RUN = (FORWARD, STEP)
PULL = (BACKWARD, STEP_BACKWARD)
ALL = (*RUN, *PULL)


def faults() -> list[Fault]:
    """All faults in this file."""
    return [*_of_norms(), *_of_rows(), *_of_features(), *_of_queries(), *_of_difference()]


def _of_norms() -> list[Fault]:
    return [
        written(
            "rms_norm",
            (*RUN, BACKWARD),
            "the sum of squares in place of their mean",
            inside(rms_norm, "rms", lambda true: lambda x, eps: true(x, eps) * x.shape[-1] ** 0.5),
        ),
        written(
            "rms_norm",
            (*RUN, BACKWARD),
            "ε outside the root",
            inside(rms_norm, "rms", lambda true: lambda x, eps: true(x, 0.0) + eps),
        ),
        written(
            "rms_norm[gain=true]",
            RUN,
            "the gain before the norm",
            _with_gain_in_front,
        ),
        written(
            "rms_norm[gain=true]",
            BACKWARD,
            "the gain left out of the rows' gradient",
            with_call(
                lambda call: call.given(
                    gain=namespace(call.cotangent).ones_like(call.inputs["gain"])
                )
            ),
        ),
        written(
            "l2_norm",
            BACKWARD,
            "the norm constant to the gradient",
            inside(l2_norm, "l2_norm_vjp", lambda _: _of_constant_length),
        ),
        written(
            "l2_norm",
            RUN,
            "the mean of squares in place of their sum",
            with_output(lambda o: o * o.shape[-1] ** 0.5),
        ),
        written(
            "layer_norm",
            (*RUN, BACKWARD),
            "not centred",
            inside(layer_norm, "_centred", lambda _: lambda x: x),
        ),
        written(
            "layer_norm",
            BACKWARD,
            "the mean constant to the gradient",
            inside(layer_norm.LayerNorm, "normalized_vjp", lambda _: _of_constant_mean),
        ),
        written(
            "layer_norm[gain=true]",
            BACKWARD,
            "the gain's gradient from rows that are not normalised",
            inside(of_norms.Norm, "backward", lambda true: _gain_by_rows(true)),
        ),
    ]


def _with_gain_in_front(truth: Truth, call: Call) -> Result:
    ones = namespace(call.inputs["gain"]).ones_like(call.inputs["gain"])
    return truth(call.given(x=call.inputs["x"] * call.inputs["gain"], gain=ones))


def _of_constant_length(x: Any, eps: float, cotangent: Any) -> Any:
    return cotangent / l2_norm.length(x, eps)


def _of_constant_mean(self: Any, x: Any, cotangent: Any) -> Any:
    return rms_norm.rms_norm_vjp(layer_norm._centred(x), self.eps, cotangent)


def _gain_by_rows(true: Any) -> Any:
    def backward(self: Any, x: Any, frame: Any, out: Any, residuals: Any, cotangent: Any) -> Any:
        gradients = true(self, x, frame, out, residuals, cotangent)
        return {**gradients, "gain": (cotangent * x["x"]).sum(axis=(0, 1, 2))}

    return backward


def _of_rows() -> list[Fault]:
    return [
        written("unit_rows", RUN, "divided by the square", _divided_twice),
        written(
            "unit_rows",
            RUN,
            "the sum of entries in place of the sum of squares",
            with_output(lambda o: o / namespace(o).abs(o).sum(axis=-1, keepdims=True).clip(1e-30)),
        ),
        written(
            "unit_rows[detach=false]",
            BACKWARD,
            "the norm's part of the gradient doubled",
            inside(of_rows, "zero_where_not", lambda true: lambda where, x: 2 * true(where, x)),
        ),
        written(
            "unit_rows[axis=channel]",
            (FORWARD, BACKWARD),
            "one norm for all heads",
            inside(UnitRows, "_along_rows", lambda true: _along_heads_too(true)),
        ),
    ]


def _divided_twice(truth: Truth, call: Call) -> Result:
    result = truth(call)
    o = call.inputs["o"]
    length = namespace(o).sqrt(row_sum(o * o))
    return Result(result.out / namespace(o).where(length > 0, length, 1.0))


def _along_heads_too(true: Any) -> Any:
    def _along_rows(self: Any, x: Any, frame: Any, reduce: str) -> Any:
        per_head = true(self, x, frame, reduce)
        return per_head * 0 + getattr(per_head, reduce)(axis=2, keepdims=True)

    return _along_rows


def _of_features() -> list[Fault]:
    return [
        written("elu_plus_one", RUN, "elu without the 1", with_output(lambda o: o - 1.0)),
        written(
            "elu_plus_one",
            PULL,
            "the derivative of the identity everywhere",
            lambda truth, call: replace(truth(call), gradients={"x": call.cotangent}),
        ),
        written(
            "hedgehog_map",
            RUN,
            "the two halves normalised separately",
            inside(hedgehog, "softmax", lambda true: _softmax_of_halves(true)),
        ),
        written(
            "hedgehog_map",
            (FORWARD, STEP),
            "W transposed",
            with_call(lambda call: call.given(weight=_transposed(call.inputs["weight"]))),
        ),
        written(
            "hedgehog_map",
            PULL,
            "W in place of its transpose in the rows' gradient",
            _by_transposed_weight,
        ),
        written(
            "hedgehog_map",
            BACKWARD,
            "the gradients of both halves added",
            _halves_added,
        ),
    ]


def _softmax_of_halves(true: Any) -> Any:
    def softmax(x: Any) -> Any:
        d = x.shape[-1] // 2
        return namespace(x).concat([true(x[..., :d]), true(x[..., d:])], axis=-1) / 2

    return softmax


def _transposed(x: Any) -> Any:
    return namespace(x).matrix_transpose(x)


def _by_transposed_weight(truth: Truth, call: Call) -> Result:
    weight = _transposed(call.inputs["weight"])
    other, true = truth(call.given(weight=weight)), truth(call)
    return Result(gradients={**true.gradients, "x": other.gradients["x"]}, d_past=true.d_past)


def _halves_added(truth: Truth, call: Call) -> Result:
    """The rows' gradient from dy = c (dz₁ + dz₂)."""
    result, d = truth(call), call.inputs["x"].shape[-1]
    d_z = call.out * (call.cotangent - row_sum(call.out * call.cotangent))
    d_y = call.mechanism.factor * (d_z[..., :d] + d_z[..., d:])
    return replace(result, gradients={**result.gradients, "x": d_y @ call.inputs["weight"]})


def _of_queries() -> list[Fault]:
    return [
        written(
            "tempered",
            RUN,
            "multiplied by τ",
            with_call(lambda call: call.given(tau=1 / call.inputs["tau"])),
        ),
        written(
            "tempered[per=head]",
            PULL,
            "dτ without the second τ",
            lambda truth, call: _scaled_gradient(truth(call), "tau", call.inputs["tau"]),
        ),
        written(
            "scaled_dims",
            PULL,
            "softplus in place of its derivative",
            inside(scaled_dims, "logistic", lambda _: scaled_dims.softplus),
        ),
        written(
            "contraction_gate",
            RUN,
            "of the query itself in place of its direction",
            inside(contraction_gate, "l2_norm", lambda _: lambda x, eps: x),
        ),
        written(
            "contraction_gate",
            BACKWARD,
            "λ (1 − λ) without the second factor",
            with_call(_without_second_factor),
        ),
        written(
            "contraction_gate",
            RUN,
            "the bias left out",
            with_call(lambda call: call.given(bias=0 * call.inputs["bias"])),
        ),
    ]


def _scaled_gradient(result: Result, name: str, factor: Any) -> Result:
    changed = {**result.gradients, name: factor * result.gradients[name]}
    return Result(gradients=changed, d_past=result.d_past)


def _without_second_factor(call: Call) -> Call:
    return replace(call, cotangent=call.cotangent / (1.0 - call.out))


def _of_difference() -> list[Fault]:
    return [
        written(
            "difference",
            RUN,
            "the sum in place of the difference",
            with_call(lambda call: call.given(lam=-call.inputs["lam"])),
        ),
        written(
            "difference",
            RUN,
            "λ times the first output",
            with_call(lambda call: call.given(o1=call.inputs["lam"] * call.inputs["o1"])),
        ),
        written(
            "difference",
            PULL,
            "dλ from the first output",
            lambda truth, call: Result(
                gradients={
                    **truth(call).gradients,
                    "lam": -(call.cotangent * call.inputs["o1"]).sum(),
                }
            ),
        ),
        written(
            "difference[per=head]",
            RUN,
            "λ of the next head",
            with_call(
                lambda call: call.given(
                    lam=namespace(call.inputs["lam"]).roll(call.inputs["lam"], 1)
                )
            ),
        ),
    ]
