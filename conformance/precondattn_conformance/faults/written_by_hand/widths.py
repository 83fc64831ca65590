"""Faults of widths, heads, batches and strides that are right for common sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from precondattn_conformance.faults.fault import (
    BACKWARD,
    FORWARD,
    STEP,
    Change,
    Fault,
    MethodCall,
    MethodResult,
    Truth,
    with_call,
)
from precondattn_conformance.faults.written_by_hand.written import written


def faults() -> list[Fault]:
    """All faults in this file."""
    return [
        written("linear", FORWARD, "no column of values from 128 on", _without_columns(128)),
        written("path", FORWARD, "no column of values from 64 on", _without_columns(64)),
        written("gated_delta", FORWARD, "no channel of keys from 128 on", with_call(_narrow)),
        written("delta", FORWARD, "the third sequence is the second", _third_sequence),
        written("softmax", STEP, "the third sequence is the second", _third_sequence),
        written("softmax", FORWARD, "groups of two query heads", with_call(_pairs_of_heads)),
        written("lucid_solve", BACKWARD, "heads after the second get no gradient", _two_heads),
        written("softmax", BACKWARD, "gradients summed over expanded axes", _summed),
        written("gla", BACKWARD, "gradients summed over expanded axes", _summed),
        written("delta", FORWARD, "the strides of k for v", with_call(_strides_of_k)),
        written(
            "softmax[bias=true]", FORWARD, "broadcast over b, and so over h", with_call(_first_head)
        ),
        written(
            "softmax[bias=true]", BACKWARD, "broadcast over h: one head's gradient", _of_one_head
        ),
    ]


def _without_columns(first: int) -> Change:
    def change(truth: Truth, call: MethodCall) -> MethodResult:
        result = truth(call)
        out = np.array(result.out)
        out[..., first:] = 0
        return replace(result, out=out)

    return change


def _narrow(call: MethodCall) -> MethodCall:
    inputs = {name: np.array(call.inputs[name]) for name in ("q", "k")}
    for array in inputs.values():
        array[..., 128:] = 0
    return call.given(**inputs)


def _third_sequence(truth: Truth, call: MethodCall) -> MethodResult:
    result = truth(call)
    out = np.array(result.out)
    if len(out) > 2:
        out[2:] = out[1]
    return replace(result, out=out)


def _pairs_of_heads(call: MethodCall) -> MethodCall:
    h, n = call.inputs["q"].shape[2], call.inputs["k"].shape[2]
    if n == h or n == 1:
        return call
    heads = np.minimum(np.arange(h) // 2, n - 1)
    return call.given(**{name: call.inputs[name][:, :, heads] for name in ("k", "v")})


def _two_heads(truth: Truth, call: MethodCall) -> MethodResult:
    result = truth(call)
    gradients = {name: np.array(array) for name, array in result.gradients.items()}
    gradients["k"][:, :, 2:] = 0
    return replace(result, gradients=gradients)


def _summed(truth: Truth, call: MethodCall) -> MethodResult:
    """The gradient of an expanded input, added up in the memory of its single entry."""
    result = truth(call)
    gradients = dict(result.gradients)
    for name, array in call.inputs.items():
        axes = tuple(i for i, step in enumerate(array.strides) if not step and array.shape[i] > 1)
        if axes:
            total = gradients[name].sum(axis=axes, keepdims=True)
            gradients[name] = np.broadcast_to(total, array.shape).copy()
    return replace(result, gradients=gradients)


def _strides_of_k(call: MethodCall) -> MethodCall:
    """Values are read with the strides of keys; the two differ if k is expanded."""
    k, v = call.inputs["k"], call.inputs["v"]
    if k.shape == v.shape:
        for axis, step in enumerate(k.strides):
            if step == 0:
                v = np.broadcast_to(v.take([0], axis=axis), v.shape)
    return call.given(v=v)


def _first_head(call: MethodCall) -> MethodCall:
    bias = call.inputs["bias"]
    if bias.shape[0] == 1 and call.inputs["q"].shape[0] > 1:
        bias = np.broadcast_to(bias[:, :1], bias.shape)
    return call.given(bias=bias)


def _of_one_head(truth: Truth, call: MethodCall) -> MethodResult:
    bias, heads = call.inputs["bias"], call.inputs["q"].shape[2]
    result = truth(call)
    if bias.shape[1] == heads or bias.shape[0] == 1:
        return result
    whole = np.broadcast_to(bias, (bias.shape[0], heads, *bias.shape[2:])).copy()
    per_head = truth(call.given(bias=whole)).gradients["bias"]
    return replace(result, gradients={**result.gradients, "bias": per_head[:, :1]})
